"""Fair scheduling of the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

import pytest

from engine.service.worker import Worker


class WorkLog:
    """Records the order of work, on a clock that advances with the work."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._now_s = 0.0

    def clock(self) -> float:
        return self._now_s

    def item(self, name: str, seconds: float = 1.0) -> Callable[[], None]:
        def work() -> None:
            self.order.append(name)
            self._now_s += seconds

        return work


async def queue(worker: Worker, work_log: WorkLog, name: str, num_items: int, seconds: float = 1.0) -> None:
    """Submit items one after another, like a model's queue."""
    for _ in range(num_items):
        await worker.run(work_log.item(name, seconds), name)


def test_long_queue_delays_another_client_by_one_item() -> None:
    """One client submits forty items at once; another submits three later, one by one."""

    async def main() -> list[str]:
        work_log = WorkLog()
        worker = Worker(work_log.clock)
        long = [asyncio.create_task(worker.run(work_log.item("long"), "long")) for _ in range(40)]
        await long[9]
        num_before = len(work_log.order)
        await queue(worker, work_log, "short", 3)
        between = work_log.order[num_before : len(work_log.order) - work_log.order[::-1].index("short")]
        await asyncio.gather(*long)
        worker.stop()
        return between

    between = asyncio.run(main())
    assert between.count("short") == 3
    assert between.count("long") <= 4  # the item running at its arrival, and one per item of its own


def test_clients_take_turns() -> None:
    async def main() -> list[str]:
        work_log = WorkLog()
        worker = Worker(work_log.clock)
        await asyncio.gather(*(queue(worker, work_log, name, 6) for name in "abc"))
        worker.stop()
        return work_log.order

    order = asyncio.run(main())
    for turn in range(0, 18, 3):
        assert sorted(order[turn : turn + 3]) == ["a", "b", "c"]


def test_time_is_shared_between_items_of_different_lengths() -> None:
    """Items of 10 s run six times as often as items of 60 s; an item that serves four clients is charged a quarter."""

    async def main(clients: int) -> int:
        work_log = WorkLog()
        worker = Worker(work_log.clock)

        async def short() -> None:
            while True:
                await worker.run(work_log.item("short", 10.0), "short", clients)

        task = asyncio.create_task(short())
        await queue(worker, work_log, "long", 4, 60.0)
        task.cancel()
        worker.stop()
        first, last = work_log.order.index("long"), len(work_log.order) - 1 - work_log.order[::-1].index("long")
        return work_log.order[first:last].count("short")

    alone, for_four = asyncio.run(main(1)), asyncio.run(main(4))
    assert alone == 18
    assert for_four == 72


def test_idle_time_is_not_saved_up() -> None:
    """A client that was idle while another worked does not get all the time when it returns."""

    async def main() -> list[str]:
        work_log = WorkLog()
        worker = Worker(work_log.clock)
        await queue(worker, work_log, "away", 1)
        await queue(worker, work_log, "busy", 20)
        work_log.order.clear()
        await asyncio.gather(queue(worker, work_log, "busy", 8), queue(worker, work_log, "away", 8))
        worker.stop()
        return work_log.order

    order = asyncio.run(main())
    assert {name: order[:8].count(name) for name in ("busy", "away")} == {"busy": 4, "away": 4}


def test_other_work_runs_between_the_yields_of_a_generator() -> None:
    seconds: list[float] = []

    async def main() -> tuple[int, list[str]]:
        work_log = WorkLog()
        worker = Worker(work_log.clock)

        def work() -> Generator[None, None, int]:
            for _ in range(4):
                work_log.item("generator")()
                yield
            return 7

        generator = worker.run_generator(work(), "generator", seconds.append)
        result, _ = await asyncio.gather(generator, queue(worker, work_log, "other", 3))
        worker.stop()
        return result, work_log.order

    result, order = asyncio.run(main())
    assert result == 7
    assert order[:6] == ["generator", "other"] * 3
    assert seconds == [1.0, 2.0, 3.0, 4.0]


def test_exceptions_are_raised_to_the_caller_and_work_continues() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def main() -> int:
        worker = Worker()
        with pytest.raises(ValueError, match="no"):
            await worker.run(fail)
        result = await worker.run(lambda: 3)
        worker.stop()
        return result

    assert asyncio.run(main()) == 3

"""Whose turn it is on the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

import pytest

from engine.service.worker import Worker


class Diary:
    """Notes who ran, on a clock of its own that pieces move."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._now_s = 0.0

    def clock(self) -> float:
        return self._now_s

    def piece(self, name: str, seconds: float = 1.0) -> Callable[[], None]:
        def work() -> None:
            self.order.append(name)
            self._now_s += seconds

        return work


async def queue(worker: Worker, diary: Diary, name: str, num_pieces: int, seconds: float = 1.0) -> None:
    """As a model's queue does: the next piece is given when the one before is finished."""
    for _ in range(num_pieces):
        await worker.run(diary.piece(name, seconds), name)


def test_a_long_queue_holds_up_another_by_one_piece() -> None:
    """One client has forty pieces waiting at once, another comes later with three, one by one."""

    async def main() -> list[str]:
        diary = Diary()
        worker = Worker(diary.clock)
        long = [asyncio.create_task(worker.run(diary.piece("long"), "long")) for _ in range(40)]
        await long[9]
        came = len(diary.order)
        await queue(worker, diary, "short", 3)
        between = diary.order[came : len(diary.order) - diary.order[::-1].index("short")]
        await asyncio.gather(*long)
        worker.stop()
        return between

    between = asyncio.run(main())
    assert between.count("short") == 3
    assert between.count("long") <= 4  # the one that ran when it came, and one for each of its own


def test_clients_take_turns() -> None:
    async def main() -> list[str]:
        diary = Diary()
        worker = Worker(diary.clock)
        await asyncio.gather(*(queue(worker, diary, name, 6) for name in "abc"))
        worker.stop()
        return diary.order

    order = asyncio.run(main())
    for turn in range(0, 18, 3):
        assert sorted(order[turn : turn + 3]) == ["a", "b", "c"]


def test_time_is_shared_where_pieces_are_of_unlike_length() -> None:
    """While one piece of 60 s runs, the other gets several of 10 s, and what serves four is charged a quarter."""

    async def main(clients: int) -> int:
        diary = Diary()
        worker = Worker(diary.clock)

        async def short() -> None:
            while True:
                await worker.run(diary.piece("short", 10.0), "short", clients)

        task = asyncio.create_task(short())
        await queue(worker, diary, "long", 4, 60.0)
        task.cancel()
        worker.stop()
        first, last = diary.order.index("long"), len(diary.order) - 1 - diary.order[::-1].index("long")
        return diary.order[first:last].count("short")

    alone, for_four = asyncio.run(main(1)), asyncio.run(main(4))
    assert alone == 18
    assert for_four == 72


def test_what_was_not_used_is_not_saved_up() -> None:
    """A client that was away while another worked alone does not shut it out when it returns."""

    async def main() -> list[str]:
        diary = Diary()
        worker = Worker(diary.clock)
        await queue(worker, diary, "away", 1)
        await queue(worker, diary, "busy", 20)
        diary.order.clear()
        await asyncio.gather(queue(worker, diary, "busy", 8), queue(worker, diary, "away", 8))
        worker.stop()
        return diary.order

    order = asyncio.run(main())
    assert {name: order[:8].count(name) for name in ("busy", "away")} == {"busy": 4, "away": 4}


def test_others_come_between_the_parts_of_a_piece() -> None:
    async def main() -> tuple[int, list[str]]:
        diary = Diary()
        worker = Worker(diary.clock)

        def parts() -> Generator[None, None, int]:
            for _ in range(4):
                diary.piece("part")()
                yield
            return 7

        result, _ = await asyncio.gather(worker.run_parts(parts(), "parts"), queue(worker, diary, "other", 3))
        worker.stop()
        return result, diary.order

    result, order = asyncio.run(main())
    assert result == 7
    assert order[:6] == ["part", "other"] * 3


def test_errors_come_out_where_they_are_awaited_and_work_goes_on() -> None:
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

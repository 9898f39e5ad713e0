"""Threads and event loop of a run."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context

import pytest

from tasks.common.event_loop import Workers, current_workers, open_workers, run_coroutine


def test_a_call_waits_for_the_futures_it_depends_on_and_not_on_a_thread():
    # More dependent calls than threads: with one blocked thread per call, the first call would never get one.
    workers, first = Workers(), Future[int]()
    dependents = [workers.submit(lambda: first.result() + 1, after=(first,)) for _ in range(100)]
    assert workers.submit(lambda: 1).result(10) == 1
    first.set_result(41)
    assert [call.result(10) for call in dependents] == [42] * 100
    workers.close()


def test_an_error_of_a_dependency_is_raised_by_the_dependent_call():
    workers, first = Workers(), Future[int]()
    dependent = workers.submit(lambda: first.result() + 1, after=(first,))
    first.set_exception(ValueError("no data"))
    with pytest.raises(ValueError, match="no data"):
        dependent.result(10)
    workers.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_a_coroutine_reaches_who_waits_and_leaves_the_loop(error: type[BaseException]):
    async def leave() -> None:
        raise error

    async def wait() -> str:
        with suppress(error):
            await asyncio.create_task(leave())
        return "done"

    with open_workers() as workers:
        with pytest.raises(error):
            workers.run_coroutine(leave())
        assert workers.start_coroutine(wait()).result(10) == "done"


def test_closing_the_workers_of_one_run_leaves_the_coroutines_of_another():
    started = threading.Barrier(3)
    release = threading.Event()

    async def wait() -> str:
        await asyncio.to_thread(started.wait, 20)
        await asyncio.to_thread(release.wait, 20)
        return "done"

    def wait_forever(opened: Future[Workers]) -> str:
        with open_workers() as workers:
            opened.set_result(workers)
            return run_coroutine(wait())

    first, second = Future[Workers](), Future[Workers]()
    with ThreadPoolExecutor(2) as threads:
        ended, kept = threads.submit(wait_forever, first), threads.submit(wait_forever, second)
        assert first.result(10) is not second.result(10)
        started.wait(10)
        first.result().close()
        with pytest.raises(CancelledError):
            ended.result(10)
        assert not kept.done()
        release.set()
        assert kept.result(10) == "done"


def test_no_thread_is_left_when_a_run_is_closed():
    with open_workers() as workers:
        run_coroutine(asyncio.sleep(0))
        assert workers.submit(lambda: 1).result(10) == 1
        assert any(thread.name == "run-loop" for thread in threading.enumerate())
    assert not any(thread.name == "run-loop" for thread in threading.enumerate())


@pytest.mark.process
def test_without_an_open_run_there_are_no_workers():
    with pytest.raises(RuntimeError, match="No run is open"):
        Context().run(current_workers)


def test_a_call_that_is_dropped_is_cancelled_and_so_are_those_after_it():
    workers, release = Workers(), threading.Event()
    busy = [workers.submit(lambda: release.wait(20)) for _ in range(32)]
    queued = workers.submit(lambda: 1)
    dependent = workers.submit(lambda: queued.result() + 1, after=(queued,))
    workers.close()
    release.set()
    assert all(call.result(20) for call in busy)
    for call in (queued, dependent):
        with pytest.raises(CancelledError):
            call.result(20)


def test_a_closed_run_starts_no_coroutine():
    workers = Workers()
    workers.run_coroutine(asyncio.sleep(0))
    workers.close()
    with pytest.raises(CancelledError, match="the run is closed"):
        workers.run_coroutine(asyncio.sleep(0))

"""Threads and event loop of a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from objectives.event_loop import run_until_stopped

T = TypeVar("T")

_MAX_THREADS = 32
_CLOSE_TIMEOUT_S = 10.0


class Workers:
    """Threads and an event loop that one run owns and closes.

    A call passed to `submit` starts once the futures in `after` are done. A call must not wait for another call on the
    pool, but name it in `after`; then the pool cannot deadlock, whatever its size.

    Coroutines share one loop and so one thread.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="run")
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T], after: tuple[Future[Any], ...] = ()) -> Future[T]:
        """Run a call on the pool, in the caller's context, once the futures of `after` are done.

        The future is cancelled if the run is closed before the call starts.
        """
        result: Future[T] = Future()
        context = copy_context()
        lock, num_pending = threading.Lock(), len(after)

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(context.run(call))
                except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the result
                    result.set_exception(error)

        def start(_: Future[Any]) -> None:
            nonlocal num_pending
            with lock:
                num_pending -= 1
                if num_pending:
                    return
            self._enqueue(run, result)

        if not after:
            self._enqueue(run, result)
        for future in after:
            future.add_done_callback(start)
        return result

    def _enqueue(self, run: Callable[[], None], result: Future[Any]) -> None:
        """Pass a call to the pool; cancel its result if the pool is closed, or closes before the call starts."""
        # Checked first: `shutdown` cancels calls, and so runs this, under the lock that `submit` takes.
        if self._is_closed:
            result.cancel()
            return
        try:
            self._pool.submit(run).add_done_callback(lambda queued: queued.cancelled() and result.cancel())
        except RuntimeError:  # closed meanwhile
            result.cancel()

    def start_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop. Cancelling the future or closing the run cancels the coroutine.

        Raises:
            concurrent.futures.CancelledError: the run is closed.
        """
        with self._lock:
            if self._is_closed:
                coroutine.close()
                raise CancelledError("the run is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=run_until_stopped, args=(self._loop,), name="run-loop", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            concurrent.futures.CancelledError: the run is closed, before the call or while the coroutine runs.
        """
        return self.start_coroutine(coroutine).result()

    def close(self) -> None:
        """Drop unstarted calls, cancel coroutines and stop the loop; running calls go on. May be called twice."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with suppress(TimeoutError):  # of a coroutine that blocks the loop; the error of the run is more important
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(_CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()


_WORKERS: ContextVar[Workers] = ContextVar("workers")


@contextmanager
def open_workers() -> Iterator[Workers]:
    """Open the workers of a run; `current_workers` returns them in this block and in copies of its context."""
    workers = Workers()
    token = _WORKERS.set(workers)
    try:
        yield workers
    finally:
        _WORKERS.reset(token)
        workers.close()


def current_workers() -> Workers:
    """Return the workers of the run that is open in this context.

    Raises:
        RuntimeError: no run is open.
    """
    try:
        return _WORKERS.get()
    except LookupError:
        raise RuntimeError("No run is open in this context: call this inside open_run or open_workers.") from None


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of the open run and wait for its result."""
    return current_workers().run_coroutine(coroutine)


def start_coroutine(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the event loop of the open run; cancelling the future cancels it."""
    return current_workers().start_coroutine(coroutine)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

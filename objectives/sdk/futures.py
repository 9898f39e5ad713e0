"""Futures of a function of an SDK result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

from objectives.sdk.protocols import ApiFuture, ConcurrentFuture

T = TypeVar("T")
U = TypeVar("U")


def map_future(
    pending: ApiFuture[T],
    function: Callable[[T], U],
    start: Callable[[Callable[[], None]], object] = lambda work: work(),
) -> ApiFuture[U]:
    """Return an SDK future of ``function(pending.result())``, computed when the result arrives.

    The future cannot be cancelled, because its request is already sent.

    Args:
        start: function that runs the computation, such as the `submit` of a pool; by default it runs on the SDK's
            thread, or on the caller's if the result is there already.
    """
    mapped: Future[U] = Future()
    mapped.set_running_or_notify_cancel()

    def run(source: ConcurrentFuture[T]) -> None:
        try:
            mapped.set_result(function(source.result()))
        except BaseException as error:  # noqa: BLE001 - raised by the future's result()
            mapped.set_exception(error)

    def begin(source: ConcurrentFuture[T]) -> None:
        try:
            start(lambda: run(source))
        except RuntimeError as error:  # The pool is closed.
            mapped.set_exception(error)

    pending.future().add_done_callback(begin)
    future_type = cast("Callable[[Future[U]], ApiFuture[U]]", type(pending))  # The SDK's class wraps any future.
    return future_type(mapped)

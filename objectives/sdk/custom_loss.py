"""Loss functions of the SDK's `forward_backward_custom` as base losses or terms."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError
from objectives.term import NoParams, Term


def sdk_term(name: str, loss_fn: Callable[..., Any]) -> Term:
    """Make a differentiable term of a ``CustomLossFnV1``, ``(data, logprobs) -> (loss, metrics)``.

    The function receives the same arguments as in `tinker.TrainingClient.forward_backward_custom` of SDK 0.38: the
    datums, and the float32 logprobs of each, ``(T,)``, with gradient. Its loss is one number,
    to which no reduction is applied. It may be any callable, such as a lambda or a `functools.partial`, and may be
    async.

    Raises:
        ObjectiveError: the callable is a `functools.partial` of a term.
    """
    if isinstance(loss_fn, partial) and isinstance(loss_fn.func, Term):
        inner = loss_fn.func.name
        raise ObjectiveError(
            f"Term {name!r} is a functools.partial of the term {inner!r}, which would be called as a loss of the SDK; "
            f"write {{'name': {name!r}, 'fn': {inner!r}, 'params': {{...}}}} with its arguments as params."
        )

    def evaluate(outputs: Outputs, batch: Batch) -> object:
        if batch.datums is None:
            raise ObjectiveError("the batch has no datums, which a loss of the SDK reads; set `datums` of the batch")
        with _explained_errors():
            returned = loss_fn(list(batch.datums), unpack(outputs.logprobs_DT, batch.offsets_D))
        return _finish(returned) if inspect.isawaitable(returned) else _split(returned)

    # `execution: async` is allowed only for a term whose `evaluate` is a coroutine function.
    async def evaluate_async(outputs: Outputs, batch: Batch) -> object:
        returned = evaluate(outputs, batch)
        return await returned if inspect.isawaitable(returned) else returned

    is_async = any(map(inspect.iscoroutinefunction, (loss_fn, type(loss_fn).__call__)))
    return Term(
        name,
        kind="differentiable",
        evaluate=evaluate_async if is_async else evaluate,
        prepare=None,
        reduction="none",
        estimator=None,
        params=NoParams,
        needs=(),
    )


async def _finish(returned: Awaitable[object]) -> tuple[Tensor, Mapping[str, float]]:
    with _explained_errors():
        result = await returned
    return _split(result)


def _split(returned: object) -> tuple[Tensor, Mapping[str, float]]:
    match returned:
        case (loss, Mapping() as metrics):
            pass
        case _:
            kind = type(returned).__name__
            if isinstance(returned, tuple):
                kind = f"({', '.join(type(part).__name__ for part in returned)})"
            raise ObjectiveError(
                f"the function returned {kind}, but a loss of the SDK returns (loss, metrics); return the loss and a "
                "dict of metrics, which may be empty"
            )
    loss = torch.as_tensor(loss)
    if loss.numel() != 1:
        raise ObjectiveError(
            f"the function returned a loss of shape {tuple(loss.shape)}, but a loss of the SDK is one number; reduce "
            "it, such as by its sum"
        )
    return loss.reshape(()), metrics


@contextmanager
def _explained_errors() -> Iterator[None]:
    """Raise an error of the function as an ObjectiveError that also says how the function was called."""
    try:
        yield
    except Exception as error:
        raise ObjectiveError(
            f"the function, called as the SDK's (data, logprobs) -> (loss, metrics), raised {type(error).__name__}: "
            f"{error}; if its parameters are (outputs, batch), decorate it with `@regularizer`"
        ) from error

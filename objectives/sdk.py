"""Losses written for the SDK's `forward_backward_custom`, used unchanged as a base loss or as a term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError
from objectives.term import NoParams, Term


def sdk_term(name: str, loss_fn: Callable[..., Any]) -> Term:
    """A differentiable term from a ``CustomLossFnV1``, ``(data, logprobs) -> (loss, metrics)``.

    The function is given what `tinker.TrainingClient.forward_backward_custom` of SDK 0.38 gives it: the list
    of datums, and for each its float32 logprobs, ``(T,)``, as part of a graph. Its loss is one number, so
    nothing is divided out.
    """

    def evaluate(outputs: Outputs, batch: Batch) -> tuple[Any, dict[str, float]]:
        if batch.datums is None:
            raise ObjectiveError("it reads the service's datums, and the batch came without: set `datums` of the batch")
        try:
            loss, metrics = loss_fn(list(batch.datums), unpack(outputs.logprobs_DT, batch.offsets_D))
            return torch.as_tensor(loss).reshape(()), metrics
        except Exception as error:
            raise ObjectiveError(
                f"called as the SDK's (data, logprobs) -> (loss, metrics), it raised {type(error).__name__}: {error}; "
                "if it takes (outputs, batch), decorate it with `@regularizer`"
            ) from error

    return Term(name, "differentiable", evaluate, None, "none", None, NoParams, ())

"""forward and forward_backward: logprobs of all targets, and the loss gradient of the adapter."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from engine.compute.base import BaseModel
from engine.compute.batches import micro_batches, pad_right
from engine.compute.datum import Datum
from engine.compute.logprobs import target_logprobs
from engine.compute.lora import Adapter
from engine.compute.loss import Loss, LossValue
from engine.errors import RequestError

Result = TypeVar("Result")

_REDUCTIONS = {"sum": sum, "max": max, "mean": fmean}


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of a pass over a batch.

    Attributes:
        logprobs_D: logprobs of each datum's targets in nats, shaped as the targets, float32 on the CPU.
        metrics: values by ``name:reduction``; always includes ``loss:sum``, the loss of the whole batch.
    """

    logprobs_D: list[Tensor]
    metrics: Mapping[str, float]


def exhaust(generator: Generator[None, None, Result]) -> Result:
    """Run a generator to its end; return its return value."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def iterate_loss(
    base: BaseModel, adapter: Adapter, data_D: Sequence[Datum], loss: Loss, max_tokens: int, backward: bool
) -> Generator[None, None, LossOutput]:
    """Compute the loss of ``data_D`` and, with ``backward``, add its gradient to the adapter's gradient.

    Sequences of similar length share a micro-batch and are never split. The generator yields between
    micro-batches, so that other clients get their turn. A loss is a sum over sequences: the result depends on the
    grouping only by rounding, and the same call gives the same bits.

    Args:
        data_D: results of `Loss.prepare`.
        max_tokens: maximum size of a micro-batch in tokens, including padding; a longer sequence has its own.

    Raises:
        RequestError: a custom loss fails or has no gradient, or a loss or a gradient is not finite.
    """
    logprobs_D: list[Tensor] = [torch.empty(0)] * len(data_D)
    metrics_D: list[Mapping[str, float]] = [{}] * len(data_D)
    loss_sum = 0.0
    for number, group in enumerate(micro_batches([len(datum.tokens_T) for datum in data_D], max_tokens)):
        if number:
            yield  # outside of `base.using`: another client may activate its own adapter now
        data_B = [data_D[index] for index in group]
        trained_M = torch.cat([loss.trained_mask(datum).flatten() for datum in data_B])
        trains = backward and bool(trained_M.any())
        with base.using(adapter):
            with torch.set_grad_enabled(trains):
                logprobs_M = _logprobs(base, adapter, data_B, trained_M)
            value = _apply_loss(loss, logprobs_M, data_B, trains)
        loss_sum += value.total.item()
        flat_B = logprobs_M.detach().cpu().split([datum.targets.numel() for datum in data_B])
        for index, datum, flat, metrics in zip(group, data_B, flat_B, value.metrics_B, strict=True):
            logprobs_D[index] = flat.reshape(datum.targets.shape)
            metrics_D[index] = metrics
    return LossOutput(logprobs_D, {**_reduce(metrics_D), "loss:sum": loss_sum})


def _apply_loss(loss: Loss, logprobs_M: Tensor, data_B: Sequence[Datum], trains: bool) -> LossValue:
    """Compute the loss of a micro-batch and backpropagate it, after a check of its gradient in the logprobs."""
    leaf_M = logprobs_M.detach().requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        value = loss.compute(leaf_M, data_B)
    if not bool(value.total.isfinite()):
        raise RequestError(f"The loss is {value.total.item()}: check its inputs, or lower the learning rate.")
    if trains:
        gradient_M = _differentiate(value.total, leaf_M)
        if not bool(gradient_M.isfinite().all()):
            raise RequestError(
                "The gradient of the loss with respect to the logprobs is not finite, but the loss is: clamp the "
                "arguments of its divisions, roots and logarithms."
            )
        logprobs_M.backward(gradient_M)
    return value


def _differentiate(total: Tensor, leaf_M: Tensor) -> Tensor:
    try:
        (gradient_M,) = torch.autograd.grad(total, leaf_M)
    except RuntimeError as error:  # a custom loss may overwrite tensors that its own gradient needs
        reason = " ".join(str(error).split())
        raise RequestError(
            f"The loss has no gradient with respect to the logprobs: {reason[:300].rstrip('.')}."
        ) from error
    return gradient_M


def _reduce(metrics_D: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: _REDUCTIONS[key.partition(":")[2]]([metrics[key] for metrics in metrics_D]) for key in metrics_D[0]}


def _logprobs(base: BaseModel, adapter: Adapter, data_B: Sequence[Datum], trained_M: Tensor) -> Tensor:
    """Logprobs ``(M,)`` of all targets of a micro-batch, datum by datum.

    Positions without a trained target are computed without autograd, so their logits are freed at once.
    """
    tokens_BT, real_N = pad_right([datum.tokens_T for datum in data_B])
    hidden_PH = base.trained_hidden(adapter, tokens_BT.to(base.device)).flatten(0, 1)
    targets_M = torch.cat([datum.targets.flatten() for datum in data_B])
    width_N = torch.cat([torch.full((len(d.targets),), d.targets[0].numel()) for d in data_B])
    rows_M = torch.repeat_interleave(torch.arange(len(width_N)), width_N)
    trained_N = torch.zeros(len(width_N), dtype=torch.bool)
    trained_N[rows_M[trained_M]] = True
    logprobs_M = torch.empty(len(targets_M), device=base.device)
    for rows_are_trained in (True, False):
        is_computed_N = trained_N == rows_are_trained
        is_computed_M = is_computed_N[rows_M]
        if not bool(is_computed_N.any()):
            continue
        new_row_N = is_computed_N.cumsum(0) - 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and rows_are_trained):
            part = target_logprobs(
                hidden_PH.index_select(0, real_N[is_computed_N].to(base.device)),
                base.head,
                base.head_lora(),
                new_row_N[rows_M[is_computed_M]].to(base.device),
                targets_M[is_computed_M].to(base.device),
            )
        computed_M = is_computed_M.nonzero()[:, 0].to(base.device)
        logprobs_M = logprobs_M.index_put((computed_M,), part)
    return logprobs_M

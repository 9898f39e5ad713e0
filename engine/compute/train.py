"""forward and forward_backward: logprobs of every target, and the gradient of the loss in the adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.compute.base import BaseModel
from engine.compute.batches import micro_batches, pad_right
from engine.compute.datum import Datum
from engine.compute.logprobs import target_logprobs
from engine.compute.lora import Adapter
from engine.errors import RequestError
from objectives.losses import cross_entropy

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy}


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a pass over a batch gave.

    Attributes:
        logprobs_D: per datum, shaped as its targets, float32 on the CPU, nats.
        loss_sum: the loss summed over all targets, nats.
    """

    logprobs_D: list[Tensor]
    loss_sum: float


def find_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function called ``name``.

    Raises:
        RequestError: this engine does not offer it.
    """
    if name not in LOSSES:
        raise RequestError(f"The loss function {name!r} is not offered by this engine; it offers {', '.join(LOSSES)}.")
    return LOSSES[name]


def run_loss(
    base: BaseModel, adapter: Adapter, data_D: Sequence[Datum], loss_fn: str, max_tokens: int, backward: bool
) -> LossOutput:
    """Compute the loss of ``data_D``; with ``backward``, add its gradient to the adapter's.

    The sequences are computed in micro-batches of like length. Each is a sum, so the result does not depend
    on how they were cut, beyond rounding; the same call gives the same bits.

    Args:
        max_tokens: of one micro-batch, padding included.

    Raises:
        RequestError: an unknown loss, or a loss or gradient that is not finite.
    """
    loss = find_loss(loss_fn)
    logprobs_D: list[Tensor] = [torch.empty(0)] * len(data_D)
    loss_sum = 0.0
    with base.using(adapter):
        for group in micro_batches([len(datum.tokens_T) for datum in data_D], max_tokens):
            data_B = [data_D[index] for index in group]
            weights_M = torch.cat([datum.weights.flatten() for datum in data_B])
            trains = backward and bool(weights_M.any())
            with torch.set_grad_enabled(trains):
                logprobs_M = _logprobs(base, data_B)
                value = loss(logprobs_M, weights_M.to(base.device))
            if not bool(value.isfinite()):
                raise RequestError(f"The loss is {value.item()}: check the weights, or lower the learning rate.")
            loss_sum += value.item()
            if trains:
                value.backward()
            flat_B = logprobs_M.detach().cpu().split([datum.targets.numel() for datum in data_B])
            for index, datum, flat in zip(group, data_B, flat_B, strict=True):
                logprobs_D[index] = flat.reshape(datum.targets.shape)
    return LossOutput(logprobs_D, loss_sum)


def _logprobs(base: BaseModel, data_B: Sequence[Datum]) -> Tensor:
    """Logprobs ``(M,)`` of all targets of a micro-batch, datum by datum.

    Targets of weight 0 take no part in the gradient: their rows' logits are dropped at once.
    """
    tokens_BT, real_N = pad_right([datum.tokens_T for datum in data_B])
    hidden_NH = base.hidden(tokens_BT.to(base.device)).flatten(0, 1)[real_N.to(base.device)]
    targets_M = torch.cat([datum.targets.flatten() for datum in data_B])
    width_N = torch.cat([torch.full((len(d.targets),), d.targets[0].numel()) for d in data_B])
    rows_M = torch.repeat_interleave(torch.arange(len(width_N)), width_N)
    trained_M = torch.cat([datum.weights.flatten() for datum in data_B]) != 0
    trained_N = torch.zeros(len(width_N), dtype=torch.bool)
    trained_N[rows_M[trained_M]] = True
    logprobs_M = torch.empty(len(targets_M), device=base.device)
    for rows_are_trained in (True, False):
        chosen_N = trained_N == rows_are_trained
        chosen_M = chosen_N[rows_M]
        if not bool(chosen_N.any()):
            continue
        new_row_N = chosen_N.cumsum(0) - 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and rows_are_trained):
            part = target_logprobs(
                hidden_NH[chosen_N.to(base.device)],
                base.head,
                base.head_lora(),
                new_row_N[rows_M[chosen_M]].to(base.device),
                targets_M[chosen_M].to(base.device),
            )
        logprobs_M = logprobs_M.index_put((chosen_M.to(base.device).nonzero()[:, 0],), part)
    return logprobs_M

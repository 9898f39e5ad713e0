"""Log-probabilities of target tokens from hidden states, without materializing all log-softmax values at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.compute.linear import linear
from engine.compute.lora import Adapter

CHUNK_ELEMENTS = 2**24  # logits per chunk, 64 MiB in float32: smaller chunks read the head's weights too often


class _HeadInputs(NamedTuple):
    """Frozen weights of the output head, and the targets to score."""

    weight_VH: Tensor
    bias_V: Tensor | None
    rows_M: Tensor
    targets_M: Tensor


def target_logprobs(
    hidden_NH: Tensor, head: nn.Linear, head_lora: tuple[Adapter, str] | None, rows_M: Tensor, targets_M: Tensor
) -> Tensor:
    """Compute the log-probability, in nats, of target ``targets_M[m]`` at row ``rows_M[m]`` of ``hidden_NH``.

    Several targets may share a row; ``rows_M`` ascends. The result is differentiable in the hidden states and in
    the head's adapter, not in the head itself. Without gradients, memory is bounded by one chunk.

    Returns:
        float32 ``(M,)``.
    """
    head_inputs = _HeadInputs(head.weight, head.bias, rows_M, targets_M)
    with _without_autocast(hidden_NH):
        down_Nr, b_Vr = None, None
        if head_lora is not None:
            adapter, name = head_lora
            factors = adapter.factors[name]
            down_Nr = nn.functional.linear(hidden_NH, factors.a.to(hidden_NH.dtype)) * adapter.scale
            b_Vr = factors.b
        logprobs_M: Any = _TargetLogprobs.apply(hidden_NH, down_Nr, b_Vr, head_inputs)
        return logprobs_M


def _without_autocast(hidden_NH: Tensor) -> torch.autocast:
    """Disable autocast, which would round the logits to three digits."""
    return torch.autocast(hidden_NH.device.type, enabled=False)


class _TargetLogprobs(torch.autograd.Function):
    """logits = hidden W' + down B' (+ bias). The backward pass reuses the softmax's memory for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, down_Nr: Tensor | None, b_Vr: Tensor | None, head_inputs: _HeadInputs
    ) -> Tensor:
        weight_VH, bias_V, rows_M, targets_M = head_inputs
        num_rows, num_tokens = hidden_NH.shape[0], weight_VH.shape[0]
        b_Vr = b_Vr.to(hidden_NH.dtype) if b_Vr is not None else None
        probs_NV = hidden_NH.new_empty(num_rows, num_tokens) if any(ctx.needs_input_grad) else None
        logprobs_M = torch.empty(len(rows_M), device=hidden_NH.device)
        step = max(1, CHUNK_ELEMENTS // num_tokens)
        starts = range(0, num_rows, step)
        # The targets of a chunk are consecutive, because rows_M ascends; find where each chunk's targets start.
        edges = torch.searchsorted(rows_M, torch.tensor([*starts, num_rows], device=rows_M.device)).tolist()
        for start, first, last in zip(starts, edges, edges[1:], strict=False):
            chunk = slice(start, min(start + step, num_rows))
            z = linear(hidden_NH[chunk], weight_VH, bias_V)
            if down_Nr is not None and b_Vr is not None:
                z.addmm_(down_Nr[chunk], b_Vr.t())
            z = z.float()
            z -= z.amax(dim=1, keepdim=True)
            rows = rows_M[first:last] - start
            chosen = z[rows, targets_M[first:last]]
            sums = z.exp_().sum(dim=1, keepdim=True)
            logprobs_M[first:last] = chosen - sums.log()[rows, 0]
            if probs_NV is not None:
                probs_NV[chunk] = z.div_(sums)
        if probs_NV is not None:
            ctx.save_for_backward(probs_NV, weight_VH, down_Nr, b_Vr, rows_M, targets_M)
        return logprobs_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_M,) = grad_outputs
        probs_NV, weight_VH, down_Nr, b_Vr, rows_M, targets_M = ctx.saved_tensors
        grad_N = grad_M.new_zeros(len(probs_NV)).index_add_(0, rows_M, grad_M)
        dlogits_NV = probs_NV.mul_(-grad_N[:, None].to(probs_NV.dtype))
        dlogits_NV.index_put_((rows_M, targets_M), grad_M.to(dlogits_NV.dtype), accumulate=True)
        dhidden_NH = linear(dlogits_NV, weight_VH.t())
        if down_Nr is None:
            return dhidden_NH, None, None, None
        # The gradient of B is the transpose of a product with V columns, because one with r columns is slow.
        return dhidden_NH, linear(dlogits_NV, b_Vr.t()), linear(down_Nr.t(), dlogits_NV.t()).t().float(), None

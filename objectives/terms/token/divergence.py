"""Divergences over K targets per position: from the reference, from a teacher, and from a distribution over labels."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce
from objectives.term import regularizer
from objectives.terms.token.entropy import append_rest

Divergence = Literal["reverse", "forward", "symmetric", "jensen_shannon"]

READS_DISTRIBUTION = ("label_divergence_topk", "teacher_reverse_kl_topk")
"""Terms that need weights which are a distribution at each position, up to a factor, and not only in expectation."""


@regularizer("divergence_topk", needs=("topk_logprobs", "ref_logprobs"))
def divergence_topk(
    outputs: Outputs, batch: Batch, *, kind: Divergence = "reverse"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence between policy p and reference q at each position, nats, ``(N,)``.

    The sum is over the K targets, which both models share, and one symbol for all other tokens. ``reverse`` is
    ``KL(p || q) = sum_k p_k (log p_k - log q_k)``, ``forward`` is KL(q || p), ``symmetric`` is the mean of both, and
    ``jensen_shannon`` is the mean of KL(p || m) and KL(q || m) with ``m = (p + q) / 2``, at most log 2.

    Sources: Kullback & Leibler 1951, "On Information and Sufficiency"; Lin 1991, "Divergence Measures Based on the
    Shannon Entropy".

    Args:
        kind: KL(policy || reference), KL(reference || policy), the mean of both, or the Jensen-Shannon divergence.

    Metrics:
        rest: mean probability of all other tokens under the policy.

    >>> batch = Batch(torch.tensor([[5]]), torch.ones(1, 1), torch.tensor([0, 1]))
    >>> half, quarter = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> round(divergence_topk(Outputs(half, ref_logprobs_DT=quarter), batch)[0].item(), 4)
    0.1438
    """
    assert outputs.ref_logprobs_DT is not None, "guaranteed by needs"
    p_DTK, q_DTK = append_rest(outputs.logprobs_DT), append_rest(outputs.ref_logprobs_DT)
    rest_DT = p_DTK[:, -1].detach().exp()
    return _divergence(p_DTK, q_DTK, kind), {"rest": reduce(rest_DT, batch, "token_mean")}


@regularizer("teacher_reverse_kl_topk", needs=("topk_logprobs",), reduction="sum")
def teacher_reverse_kl_topk(outputs: Outputs, batch: Batch) -> Tensor:
    """Reverse KL ``sum_k p_k (log p_k - log q_k)`` to the teacher q at each position, nats, ``(N,)``.

    The weights of the K targets are the teacher's probabilities, and both distributions are normalized over the targets
    with a positive weight. It is meant as the base loss of distillation with soft targets; the gradient is that of
    tinker-cookbook's `reverse_kl_custom_loss`.

    Source: tinker-cookbook, `distillation/sdft.py`; Shenfeld et al. 2026, "Self-Distillation Enables Continual
    Learning" (arXiv:2601.19897).

    >>> batch = Batch(torch.tensor([[5, 6]]), torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]))
    >>> round(teacher_reverse_kl_topk(Outputs(torch.tensor([[0.6, 0.2]]).log()), batch).item(), 4)
    0.1308
    """
    is_target_DTK = batch.weights_DT > 0
    # At positions without targets, both distributions are set to uniform, so the divergence is 0.
    any_DT1 = is_target_DTK.any(-1, keepdim=True)
    lowest = torch.finfo(outputs.logprobs_DT.dtype).min
    is_left_out_DTK = any_DT1 & ~is_target_DTK
    p_DTK = outputs.logprobs_DT.masked_fill(is_left_out_DTK, lowest).where(any_DT1, 0.0).log_softmax(-1)
    q_DTK = batch.weights_DT.to(p_DTK.dtype).where(is_target_DTK, 1.0).log().masked_fill(is_left_out_DTK, lowest)
    difference_DTK = (p_DTK - q_DTK.log_softmax(-1)).masked_fill(is_left_out_DTK, 0.0)
    return (p_DTK.exp() * difference_DTK).sum(-1)


@regularizer("label_divergence_topk", needs=("topk_logprobs",))
def label_divergence_topk(
    outputs: Outputs, batch: Batch, *, kind: Literal["forward", "jensen_shannon"] = "forward"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence between policy p and the target distribution q of each position, nats, ``(N,)``.

    q are the weights of the K targets, divided by their sum; all other tokens have probability 0 under q. ``forward``
    is ``KL(q || p) = sum_k q_k (log q_k - log p_k)``, with the gradient of the cross-entropy and 0 for equal
    distributions. ``jensen_shannon`` is the mean of KL(p || m) and KL(q || m) with ``m = (p + q) / 2``, at most log 2;
    tokens without a target add ``log 2 / 2`` times their probability. Both values equal the divergences over the whole
    vocabulary. The reverse KL is infinite, because q is 0 for most tokens. The value is 0 at positions without targets.

    Sources: Kullback & Leibler 1951, "On Information and Sufficiency"; Lin 1991, "Divergence Measures Based on the
    Shannon Entropy".

    Args:
        kind: KL(targets || policy), with the gradient of the cross-entropy, or the Jensen-Shannon divergence.

    Metrics:
        rest: mean probability of the tokens without a target, under the policy.

    >>> batch = Batch(torch.tensor([[5, 6]]), torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]))
    >>> round(label_divergence_topk(Outputs(torch.tensor([[0.5, 0.25]]).log()), batch)[0].item(), 4)
    0.3466
    """
    weights_DTK = batch.weights_DT.to(outputs.logprobs_DT.dtype)
    any_DT = (weights_DTK > 0).any(-1)
    q_DTK = weights_DTK / weights_DTK.sum(-1, keepdim=True).where(any_DT[:, None], 1.0)
    p_DTK = outputs.logprobs_DT.exp()
    rest_DT = (1 - p_DTK.sum(-1)).clamp(min=0.0)
    metrics = {"rest": reduce(rest_DT.detach(), batch, "token_mean")}
    if kind == "forward":
        return (torch.xlogy(q_DTK, q_DTK) - q_DTK * outputs.logprobs_DT).sum(-1), metrics
    middle_DTK = torch.logaddexp(outputs.logprobs_DT, q_DTK.log()) - math.log(2)
    # All other tokens have q = 0, so that m = p / 2.
    p_part_DT = (p_DTK * (outputs.logprobs_DT - middle_DTK)).sum(-1) + rest_DT * math.log(2)
    q_part_DT = (torch.xlogy(q_DTK, q_DTK) - q_DTK * middle_DTK).sum(-1)
    return ((p_part_DT + q_part_DT) / 2).where(any_DT, 0.0), metrics


def _divergence(p_DTK: Tensor, q_DTK: Tensor, kind: Divergence) -> Tensor:
    match kind:
        case "reverse":
            return _kl(p_DTK, q_DTK)
        case "forward":
            return _kl(q_DTK, p_DTK)
        case "symmetric":
            return (_kl(p_DTK, q_DTK) + _kl(q_DTK, p_DTK)) / 2
    middle_DTK = torch.logaddexp(p_DTK, q_DTK) - math.log(2)
    return (_kl(p_DTK, middle_DTK) + _kl(q_DTK, middle_DTK)) / 2


def _kl(p_DTK: Tensor, q_DTK: Tensor) -> Tensor:
    return (p_DTK.exp() * (p_DTK - q_DTK)).sum(-1)

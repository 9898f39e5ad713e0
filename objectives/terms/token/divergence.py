"""Divergence from a reference over K targets per position, with all other tokens as one more symbol."""

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

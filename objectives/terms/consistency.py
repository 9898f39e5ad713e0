"""Consistency of paired datums: one answer, asked for in two ways, should be as likely either way."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError
from objectives.labels import Pairs, pairs_of
from objectives.reductions import mean_by_datum
from objectives.term import regularizer

Measure = Literal["mse", "l1", "cosine", "kl", "mean"]

# Beyond it the probability of all other tokens would have no finite logarithm.
_ALMOST_CERTAIN = math.log1p(-1e-6)


@regularizer("consistency", reduction="none")
def consistency(
    outputs: Outputs, batch: Batch, *, measure: Measure = "mse", label: str = "pair"
) -> tuple[Tensor, dict[str, float]]:
    """How differently the two datums of a pair are predicted, mean over the pairs, 0-d.

    The datums of a pair have the same label (`objectives.labels`) and train the same answer, token by token, after two
    prompts: logprobs a and b, probabilities p and q. Per pair, as the mean over its tokens:

    - ``mse``: ``(a - b)^2``; ``l1``: ``|a - b|``, nats;
    - ``kl``: half of Jeffreys' divergence between "this token" and "any other", ``(p - q) (logit p - logit q) / 2``,
      nats: what one logprob shows of the divergence, and a lower bound of it;
    - ``cosine``: ``1 - a.b / (|a| |b|)`` over the whole answer: its profile, not its likelihood.

    ``mean`` is for answers of different lengths: the squared difference of their mean logprobs.

    Source: consistency under rephrasing, Elazar et al. 2021, "Measuring and Improving Consistency in Pretrained
    Language Models" (arXiv:2102.01017).

    Metrics:
        gap: nats: mean over the pairs of the distance between the mean logprobs of the two.

    >>> labels_D = {"pair": torch.tensor([1, 1])}
    >>> batch = Batch(torch.tensor([5, 5]), torch.ones(2), torch.tensor([0, 1, 2]), labels_D=labels_D)
    >>> consistency(Outputs(torch.tensor([-1.0, -3.0])), batch)
    (tensor(4.), {'gap': 2.0})
    """
    pairs = pairs_of(batch, label)
    means_D = mean_by_datum(outputs.logprobs_DT, batch)
    difference_P = means_D[pairs.first_P] - means_D[pairs.second_P]
    metrics = {"gap": float(difference_P.detach().abs().mean())}
    if measure == "mean":
        return (difference_P**2).mean(), metrics
    a_PT, b_PT, lengths_P = _aligned(outputs.logprobs_DT, batch, pairs, label)
    return _distance(a_PT, b_PT, lengths_P, measure).mean(), metrics


def _aligned(logprobs_DT: Tensor, batch: Batch, pairs: Pairs, label: str) -> tuple[Tensor, Tensor, Tensor]:
    """The trained tokens of the first datums and of the second ones, side by side, and each pair's number of them."""
    lengths_D = torch.segment_reduce(batch.mask_DT.float(), "sum", offsets=batch.offsets_D, axis=0).long()
    first_P, second_P = lengths_D[pairs.first_P], lengths_D[pairs.second_P]
    if not torch.equal(first_P, second_P):
        pair = int((first_P != second_P).nonzero()[0, 0])
        raise ObjectiveError(
            f"a pair {label!r} has {int(first_P[pair])} and {int(second_P[pair])} trained tokens where the same answer "
            "is compared token by token: pair the same answer after two prompts, or take the measure 'mean'"
        )
    offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)])
    trained_D = unpack(logprobs_DT[batch.mask_DT], offsets_D)
    a_PT, b_PT = (torch.cat([trained_D[d] for d in datums.tolist()]) for datums in pairs)
    return a_PT, b_PT, first_P


def _distance(a_PT: Tensor, b_PT: Tensor, lengths_P: Tensor, measure: Measure) -> Tensor:
    if measure == "cosine":
        products = (_sum(x * y, lengths_P) for x, y in ((a_PT, b_PT), (a_PT, a_PT), (b_PT, b_PT)))
        dot_P, square_a_P, square_b_P = products
        return 1 - dot_P / (square_a_P * square_b_P).clamp(min=1e-12).sqrt()
    difference_PT = a_PT - b_PT
    if measure == "mse":
        distance_PT = difference_PT**2
    elif measure == "l1":
        distance_PT = difference_PT.abs()
    else:
        distance_PT = (a_PT.exp() - b_PT.exp()) * (_logit(a_PT) - _logit(b_PT)) / 2
    return _sum(distance_PT, lengths_P) / lengths_P


def _sum(values_PT: Tensor, lengths_P: Tensor) -> Tensor:
    return torch.segment_reduce(values_PT, "sum", lengths=lengths_P, axis=0)


def _logit(logprobs: Tensor) -> Tensor:
    logprobs = logprobs.clamp(max=_ALMOST_CERTAIN)
    return logprobs - torch.log(-torch.expm1(logprobs))

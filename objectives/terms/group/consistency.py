"""Consistency of paired datums: the same completion should be equally likely after two phrasings of a prompt."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError
from objectives.labels import Pairs, find_pairs
from objectives.reductions import mean_by_datum
from objectives.term import regularizer

Measure = Literal["mse", "l1", "cosine", "kl", "mean"]

# Upper bound of a logprob; at 0 the probability of all other tokens has no finite logarithm.
_ALMOST_CERTAIN = math.log1p(-1e-6)


@regularizer("consistency", reduction="none")
def consistency(
    outputs: Outputs, batch: Batch, *, measure: Measure = "mse", label: str = "pair"
) -> tuple[Tensor, dict[str, float]]:
    """Distance between the predictions for the two datums of a pair, mean over the pairs, 0-d.

    The datums of a pair have the same label (`objectives.labels`) and train the same completion, token by token, after
    two prompts, with logprobs a and b and probabilities p and q. The measure of a pair is a mean over its tokens:

    - ``mse``: ``(a - b)^2``; ``l1``: ``|a - b|``, nats;
    - ``kl``: half of Jeffreys' divergence between the events "this token" and "any other token",
      ``(p - q) (logit p - logit q) / 2``, nats; a lower bound of the divergence over the vocabulary;
    - ``cosine``: ``1 - a.b / (|a| |b|)`` over the whole completion, which compares profiles and ignores scale; 1 if all
      logprobs of one of them are 0.

    ``mean`` is the squared difference of the mean logprobs; it allows completions of different lengths.

    Source: consistency under rephrasing, Elazar et al. 2021, "Measuring and Improving Consistency in Pretrained
    Language Models" (arXiv:2102.01017).

    Args:
        measure: distance between the two predictions.
        label: name of the label that the datums of a pair share.

    Metrics:
        gap: nats: absolute difference between the mean logprobs of the two datums, mean over the pairs.

    >>> labels_D = {"pair": torch.tensor([1, 1])}
    >>> batch = Batch(torch.tensor([5, 5]), torch.ones(2), torch.tensor([0, 1, 2]), labels_D=labels_D)
    >>> consistency(Outputs(torch.tensor([-1.0, -3.0])), batch)
    (tensor(4.), {'gap': 2.0})
    """
    pairs = find_pairs(batch, label)
    means_D = mean_by_datum(outputs.logprobs_DT, batch)
    difference_P = means_D[pairs.first_P] - means_D[pairs.second_P]
    metrics = {"gap": float(difference_P.detach().abs().mean())}
    if measure == "mean":
        return (difference_P**2).mean(), metrics
    a_PT, b_PT, lengths_P = _aligned(outputs.logprobs_DT, batch, pairs, label, measure)
    return _distance(a_PT, b_PT, lengths_P, measure).mean().to(means_D.dtype), metrics


def _aligned(
    logprobs_DT: Tensor, batch: Batch, pairs: Pairs, label: str, measure: Measure
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the trained logprobs of all first datums, of all second datums, and the number of tokens per pair."""
    lengths_D = torch.segment_reduce(batch.mask_DT.float(), "sum", offsets=batch.offsets_D, axis=0).long()
    first_P, second_P = lengths_D[pairs.first_P], lengths_D[pairs.second_P]
    if not torch.equal(first_P, second_P):
        pair = int((first_P != second_P).nonzero()[0, 0])
        raise ObjectiveError(
            f"a pair {label!r} has {int(first_P[pair])} and {int(second_P[pair])} trained tokens, but measure "
            f"{measure!r} compares completions token by token; pair the same completion after two prompts, or set "
            "measure to 'mean'"
        )
    offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)])
    trained_D = unpack(logprobs_DT[batch.mask_DT], offsets_D)
    a_PT, b_PT = (torch.cat([trained_D[d] for d in datums.tolist()]) for datums in pairs)
    return a_PT, b_PT, first_P


def _distance(a_PT: Tensor, b_PT: Tensor, lengths_P: Tensor, measure: Measure) -> Tensor:
    if measure == "cosine":
        # float64, because the products of logprobs near 0 are small.
        a_PT, b_PT = a_PT.double(), b_PT.double()
        dot_P, square_a_P, square_b_P = (_sum(x * y, lengths_P) for x, y in ((a_PT, b_PT), (a_PT, a_PT), (b_PT, b_PT)))
        return 1 - dot_P / (_positive(square_a_P).sqrt() * _positive(square_b_P).sqrt())
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


def _positive(squares_P: Tensor) -> Tensor:
    """Return squared norms, with 1 instead of 0, for which a quotient would have no gradient."""
    return squares_P.where(squares_P > 0, 1.0)


def _logit(logprobs: Tensor) -> Tensor:
    logprobs = logprobs.clamp(max=_ALMOST_CERTAIN)
    return logprobs - torch.log(-torch.expm1(logprobs))

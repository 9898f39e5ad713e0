"""Confidence penalty: the part of the negative entropy that one logprob per token shows."""

from __future__ import annotations

from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce
from objectives.term import regularizer


@regularizer("confidence")
def confidence(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """``p log p`` of each target token, nats, ``(N,)``; the mean over the trained tokens is minimised.

    It is the target's own summand of the negative entropy ``-H = sum_v p_v log p_v``, whose minimisation is
    the confidence penalty; a service returns no other summand. ``d/dlogprob = p (1 + log p)`` lies in
    [-0.14, 1]: a target surer than 1/e is held back, the more the surer, and a rarer one is helped a little.

    Source: Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output Distributions"
    (arXiv:1701.06548).

    Metrics:
        mean_probability: mean p over the trained tokens.
    """
    probabilities_DT = outputs.logprobs_DT.exp()
    mean_probability = reduce(probabilities_DT.detach(), batch, "token_mean")
    return probabilities_DT * outputs.logprobs_DT, {"mean_probability": mean_probability}

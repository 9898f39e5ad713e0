"""Penalties on confident distributions, from the target's logprob alone: confidence and sparsity."""

from __future__ import annotations

from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce
from objectives.term import regularizer


@regularizer("confidence")
def confidence(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Confidence penalty, ``p log p`` of each target token, nats, ``(N,)``; minimizes the mean over trained tokens.

    ``p log p`` is the target's summand of the negative entropy ``-H = sum_v p_v log p_v``, the confidence penalty. A
    service does not return the other summands. The derivative with respect to the logprob, ``p (1 + log p)``, lies in
    [-0.14, 1]: minimization lowers targets with p above 1/e and slightly raises targets with p below 1/e.

    Source: Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output Distributions"
    (arXiv:1701.06548).

    Metrics:
        mean_probability: mean p over the trained tokens.
    """
    probabilities_DT = outputs.logprobs_DT.exp()
    mean_probability = reduce(probabilities_DT.detach(), batch, "token_mean")
    return probabilities_DT * outputs.logprobs_DT, {"mean_probability": mean_probability}


@regularizer("sparsity")
def sparsity(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Gini-Simpson summand, ``p - p^2`` of each target token, ``(N,)``; minimizes the mean over trained tokens.

    ``p - p^2`` is the target's summand of ``|p|_1 - |p|_2^2 = 1 - sum_v p_v^2``, which is 0 for a distribution on
    one token and has its maximum at the uniform one. The derivative with respect to the logprob, ``p (1 - 2p)``, lies
    in [-1, 1/8]: minimization raises targets with p above 1/2 and lowers the others.

    Source: the Gini-Simpson index (Simpson 1949, "Measurement of Diversity"), which is the Tsallis entropy of
    order 2 used by sparsemax (Martins & Astudillo 2016, arXiv:1602.02068).

    Metrics:
        undecided: share of the trained tokens with p between 0.1 and 0.9.
    """
    probabilities_DT = outputs.logprobs_DT.exp()
    undecided_DT = (probabilities_DT > 0.1) & (probabilities_DT < 0.9)
    undecided = reduce(undecided_DT.to(probabilities_DT.dtype), batch, "token_mean")
    return probabilities_DT * (1 - probabilities_DT), {"undecided": undecided}

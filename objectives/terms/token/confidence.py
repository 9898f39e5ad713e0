"""Confidence penalty, estimated from one logprob per token."""

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

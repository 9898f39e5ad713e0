"""Entropy of the next token, estimated from sampled tokens or taken over K targets; minimised is its negative."""

from __future__ import annotations

from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce
from objectives.term import regularizer
from objectives.terms.several_targets import with_rest


@regularizer("negative_entropy", needs=("sampling_logprobs",))
def negative_entropy(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """``r log p`` of each sampled token, nats, ``(N,)``, with ``r = p / q`` and q the policy that sampled.

    Over tokens sampled from q its mean is ``sum_v p_v log p_v = -H``, and its gradient, ``r (1 + log p)``, is that of
    ``-H``: both without bias, token by token, however far the policy has moved. Minimised, the policy stays undecided.

    Source: the entropy bonus of Williams & Peng 1991, "Function Optimization Using Connectionist Reinforcement Learning
    Algorithms", by importance sampling.

    Metrics:
        entropy: nats per token, the estimate.

    >>> import torch
    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> sampled = torch.tensor([-1.0, -3.0])
    >>> negative_entropy(Outputs(sampled, sampling_logprobs_DT=sampled), batch)
    (tensor([-1., -3.]), {'entropy': tensor(2.)})
    """
    sampling_DT = outputs.sampling_logprobs_DT
    assert sampling_DT is not None, "held by needs"
    # Of prompt tokens the ratio may be beyond all range.
    ratios_DT = (outputs.logprobs_DT - sampling_DT).where(batch.mask_DT, 0.0).exp()
    value_DT = ratios_DT * outputs.logprobs_DT
    return value_DT, {"entropy": -reduce(value_DT.detach(), batch, "token_mean")}


@regularizer("negative_entropy_topk", needs=("topk_logprobs",))
def negative_entropy_topk(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_k p_k log p_k`` of each position, nats, ``(N,)``, over its K targets and all other tokens as one.

    It is the full form of the confidence penalty, up to the rest: a lower bound of the entropy is raised.

    Source: Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output Distributions"
    (arXiv:1701.06548).

    Metrics:
        entropy: nats per token; rest: the mean probability of all other tokens.

    >>> import torch
    >>> batch = Batch(torch.tensor([[5, 6]]), torch.ones(1, 2), torch.tensor([0, 1]))
    >>> value, metrics = negative_entropy_topk(Outputs(torch.tensor([[0.5, 0.25]]).log()), batch)
    >>> metrics
    {'entropy': tensor(1.0397), 'rest': tensor(0.2500)}
    """
    logprobs_DTK = with_rest(outputs.logprobs_DT)
    probabilities_DTK = logprobs_DTK.exp()
    value_DT = (probabilities_DTK * logprobs_DTK).sum(-1)
    return value_DT, {
        "entropy": -reduce(value_DT.detach(), batch, "token_mean"),
        "rest": reduce(probabilities_DTK[:, -1].detach(), batch, "token_mean"),
    }

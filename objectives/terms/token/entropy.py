"""Negative entropy of the next token, estimated from sampled tokens or from K targets per position."""

from __future__ import annotations

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.reductions import reduce
from objectives.term import regularizer

# Lower bound of the probability of all other tokens, so that its logarithm is finite.
_MIN_REST = 1e-6


def append_rest(logprobs_DTK: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together: ``(N, K) -> (N, K + 1)``, nats.

    Merging symbols can only lower an entropy or a divergence. The result over K + 1 symbols is therefore a lower bound
    of the value over the vocabulary; it is tight if the K targets have most of the probability.

    Args:
        logprobs_DTK: logprobs of K different tokens at each position.

    >>> append_rest(torch.tensor([[0.5, 0.3]]).log()).exp()
    tensor([[0.5000, 0.3000, 0.2000]])
    """
    rest_DT = (1 - logprobs_DTK.exp().sum(-1, keepdim=True)).clamp(min=_MIN_REST)
    return torch.cat([logprobs_DTK, rest_DT.log()], -1)


def sampled_entropy(outputs: Outputs, batch: Batch) -> Tensor:
    """Summands of the entropy by importance sampling, ``-r log p``, nats, ``(N,)``; see `negative_entropy`."""
    sampling_DT = outputs.sampling_logprobs_DT
    assert sampling_DT is not None, "guaranteed by needs"
    # The ratio of a prompt token can overflow.
    ratios_DT = (outputs.logprobs_DT - sampling_DT).where(batch.mask_DT, 0.0).exp()
    return -ratios_DT * outputs.logprobs_DT


@regularizer("negative_entropy", needs=("sampling_logprobs",), metric_values={"entropy": sampled_entropy})
def negative_entropy(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative entropy by importance sampling, ``r log p`` of each sampled token, nats, ``(N,)``; ``r = p / q``.

    q is the policy that sampled the tokens. Over tokens of q, the mean is an unbiased estimate of
    ``-H = sum_v p_v log p_v``, and the gradient ``r (1 + log p)`` is an unbiased estimate of its gradient, for any p.
    Minimization keeps the entropy high.

    Source: the entropy bonus of Williams & Peng 1991, "Function Optimization Using Connectionist Reinforcement Learning
    Algorithms", by importance sampling.

    Metrics:
        entropy: estimate, nats per token; a target can constrain it.

    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> sampled = torch.tensor([-1.0, -3.0])
    >>> negative_entropy(Outputs(sampled, sampling_logprobs_DT=sampled), batch)
    (tensor([-1., -3.]), {'entropy': tensor(2.)})
    """
    entropy_DT = sampled_entropy(outputs, batch)
    return -entropy_DT, {"entropy": reduce(entropy_DT.detach(), batch, "token_mean")}


def topk_entropy(outputs: Outputs, batch: Batch) -> Tensor:
    """Entropy over K targets and one class for all other tokens, nats, ``(N,)``."""
    logprobs_DTK = append_rest(outputs.logprobs_DT)
    return -(logprobs_DTK.exp() * logprobs_DTK).sum(-1)


@regularizer("negative_entropy_topk", needs=("topk_logprobs",), metric_values={"entropy": topk_entropy})
def negative_entropy_topk(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative entropy over K targets, ``sum_k p_k log p_k`` per position, nats, ``(N,)``; other tokens count as one.

    This is the confidence penalty except for the merged other tokens: minimization raises a lower bound of the entropy.

    Source: Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output Distributions"
    (arXiv:1701.06548).

    Metrics:
        entropy: nats per token, which a target can constrain; rest: mean probability of all other tokens.

    >>> batch = Batch(torch.tensor([[5, 6]]), torch.ones(1, 2), torch.tensor([0, 1]))
    >>> value, metrics = negative_entropy_topk(Outputs(torch.tensor([[0.5, 0.25]]).log()), batch)
    >>> metrics
    {'entropy': tensor(1.0397), 'rest': tensor(0.2500)}
    """
    entropy_DT = topk_entropy(outputs, batch)
    rest_DT = append_rest(outputs.logprobs_DT.detach())[:, -1].exp()
    return -entropy_DT, {
        "entropy": reduce(entropy_DT.detach(), batch, "token_mean"),
        "rest": reduce(rest_DT, batch, "token_mean"),
    }

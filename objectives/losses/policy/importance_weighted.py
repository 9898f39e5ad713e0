"""Policy-gradient losses with one importance ratio per token: importance_sampling, ppo and cispo.

Symbols: p is the policy in training, q the policy that sampled the tokens, ``r = p / q`` the ratio of a token, A its
advantage and ``sg`` the stop-gradient operator. A token with advantage 0 contributes nothing to the loss.
"""

from __future__ import annotations

from torch import Tensor

from objectives.losses.policy.ratios import Threshold, clip_objective, clip_ratios, token_log_ratios


def importance_sampling(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor) -> Tensor:
    """Importance-sampled policy gradient, ``-sum(r A)``; 0-d.

    On samples of the current policy, the gradient equals that of REINFORCE. The ratio is unbounded: one token that has
    become much likelier since it was sampled can outweigh all other tokens.

    Sources: Williams 1992, "Simple statistical gradient-following algorithms"; the Tinker documentation,
    "Loss functions".

    Args:
        logprobs_DT: log p of each token, nats, ``(N,)``.
        sampling_logprobs_DT: log q of each token, nats, ``(N,)``.
        advantages_DT: ``(N,)``.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0])
    >>> importance_sampling(lp, lp, torch.tensor([0.5, 1.0]))
    tensor(-1.5000)
    """
    log_ratio_DT = token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT)
    return -(log_ratio_DT.exp() * advantages_DT).sum()


def ppo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> Tensor:
    """Clipped surrogate of proximal policy optimization, ``-sum(min(r A, clip(r, low, high) A))``; 0-d.

    A token's gradient is zero once its ratio is past the bound that its advantage pushes it toward.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 7.
    The default bounds are those of the Tinker documentation.

    Args:
        logprobs_DT: log p of each token, nats, ``(N,)``.
        sampling_logprobs_DT: log q of each token, nats, ``(N,)``.
        advantages_DT: ``(N,)``.
        clip_low_threshold: lower bound of the ratio, at least 0; a number, or ``(N,)``.
        clip_high_threshold: upper bound of the ratio; a number, or ``(N,)``.

    >>> import torch
    >>> ppo(torch.tensor([0.0, -2.0]), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0]))
    tensor(-2.2000)
    """
    ratio_DT = token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT).exp()
    return -clip_objective(ratio_DT, advantages_DT, clip_low_threshold, clip_high_threshold).sum()


def cispo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    clip_low_threshold: Threshold = 0.0,
    clip_high_threshold: Threshold = 4.0,
) -> Tensor:
    """REINFORCE with a clipped importance weight, ``-sum(sg[clip(r, low, high)] A log p)``; 0-d.

    The weight is treated as a constant, so no token loses its gradient when its weight is clipped. The default bounds
    limit the weight only from above.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv:2506.13585), equation 4. The default bounds are those of the
    Tinker documentation.

    Args:
        logprobs_DT: log p of each token, nats, ``(N,)``.
        sampling_logprobs_DT: log q of each token, nats, ``(N,)``.
        advantages_DT: ``(N,)``.
        clip_low_threshold: lower bound of the weight, at least 0; a number, or ``(N,)``.
        clip_high_threshold: upper bound of the weight; a number, or ``(N,)``.

    >>> import torch
    >>> cispo(torch.tensor([-1.0, -2.0]), torch.tensor([-4.0, -2.0]), torch.tensor([1.0, 1.0]))
    tensor(6.)
    """
    ratio_DT = token_log_ratios(logprobs_DT.detach(), sampling_logprobs_DT, advantages_DT).exp()
    weight_DT = clip_ratios(ratio_DT, clip_low_threshold, clip_high_threshold)
    return -(weight_DT * advantages_DT * logprobs_DT).sum()

"""REINFORCE on samples of another policy, reweighted to this one."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.ratios import token_log_ratios


def importance_sampling(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor) -> Tensor:
    """Importance-sampled policy gradient, ``-sum(r A)`` with ``r = p / q`` per token; 0-d.

    On samples of the policy itself its gradient is REINFORCE's. The ratio is unbounded: a token that became
    much more likely than it was sampled with outweighs all others.

    Sources: Williams 1992, "Simple statistical gradient-following algorithms"; the Tinker documentation,
    "Loss functions".

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q.
        advantages_DT: ``(N,)``; 0 leaves a token out.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0])
    >>> importance_sampling(lp, lp, torch.tensor([0.5, 1.0]))
    tensor(-1.5000)
    """
    log_ratio_DT = token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT)
    return -(log_ratio_DT.exp() * advantages_DT).sum()

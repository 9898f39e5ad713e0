"""Direct reward optimization: a quadratic leash instead of a ratio."""

from __future__ import annotations

from torch import Tensor


def dro(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor, *, beta: float = 0.05) -> Tensor:
    """Off-policy objective with a quadratic penalty, ``-sum(A log p - beta/2 (log p - log q)^2)``; 0-d.

    The penalty holds every token given, also one of advantage 0: where prompt tokens carry a made-up sampling
    logprob, give them the model's own, or leave them out.

    Source: Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models
    Alignment" (arXiv:2405.19107), in the form of the Tinker documentation, where the advantage has the place of
    reward minus value; ``beta`` is the one of its example.

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q.
        advantages_DT: ``(N,)``.
        beta: strength of the penalty, per nat, at least 0.

    >>> import torch
    >>> dro(torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([2.0]), beta=0.5)
    tensor(3.)
    """
    log_ratio_DT = logprobs_DT - sampling_logprobs_DT
    return -(advantages_DT * logprobs_DT - beta / 2 * log_ratio_DT**2).sum()

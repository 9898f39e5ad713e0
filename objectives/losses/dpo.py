"""Direct preference optimization against a frozen reference, and its variant that cannot run away."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from objectives.losses.pairs import PairLogprobs


def dpo(policy: PairLogprobs, reference: PairLogprobs, *, beta: float = 0.1) -> Tensor:
    """``-log sigmoid(beta (m - m_ref))`` of each pair, nats, ``(P,)``, with ``m`` the margin of a pair.

    Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv:2305.18290), equation 7.

    Args:
        beta: how strongly the policy is held to the reference, per nat.

    >>> import torch
    >>> one = torch.ones(1)
    >>> policy = PairLogprobs(torch.tensor([-3.0]), torch.tensor([-5.0]), one, one)
    >>> dpo(policy, policy)
    tensor([0.6931])
    """
    return -logsigmoid(beta * (policy.margin_P - reference.margin_P))


def ipo(policy: PairLogprobs, reference: PairLogprobs, *, beta: float = 0.1) -> Tensor:
    """``((m - m_ref) - 1 / (2 beta))^2`` of each pair, ``(P,)``: the margin has a goal, and does not grow beyond.

    Source: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv:2310.12036), equation 17, where beta is called tau.

    Args:
        beta: how strongly the policy is held to the reference, per nat.

    >>> import torch
    >>> one = torch.ones(1)
    >>> policy = PairLogprobs(torch.tensor([-3.0]), torch.tensor([-5.0]), one, one)
    >>> ipo(policy, policy, beta=0.5)
    tensor([1.])
    """
    return (policy.margin_P - reference.margin_P - 1 / (2 * beta)) ** 2

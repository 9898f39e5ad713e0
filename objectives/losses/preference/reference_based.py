"""Preference losses that compare the policy with a frozen reference model: dpo, ipo and kto."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from objectives.losses.preference.pairs import PairLogprobs


def dpo(policy: PairLogprobs, reference: PairLogprobs, *, beta: float = 0.1) -> Tensor:
    """Direct preference optimization, ``-log sigmoid(beta (m - m_ref))`` per pair, in nats, ``(P,)``.

    The margin ``m`` is the policy's log-probability of the chosen completion minus that of the rejected one; ``m_ref``
    is the reference's margin.

    Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv:2305.18290), equation 7.

    Args:
        beta: strength of the pull toward the reference, per nat.

    >>> import torch
    >>> one = torch.ones(1)
    >>> policy = PairLogprobs(torch.tensor([-3.0]), torch.tensor([-5.0]), one, one)
    >>> dpo(policy, policy)
    tensor([0.6931])
    """
    return -logsigmoid(beta * (policy.margin_P - reference.margin_P))


def ipo(policy: PairLogprobs, reference: PairLogprobs, *, beta: float = 0.1) -> Tensor:
    """Identity preference optimization, ``((m - m_ref) - 1 / (2 beta))^2`` per pair, ``(P,)``; margins as in `dpo`.

    The loss pulls ``m - m_ref`` toward ``1 / (2 beta)``, so the margin does not grow without bound. The
    log-probabilities are sums over tokens; some implementations, such as TRL's, divide them by the completion's length.

    Source: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv:2310.12036), equation 17, where beta is called tau.

    Args:
        beta: strength of the pull toward the reference, per nat.

    >>> import torch
    >>> one = torch.ones(1)
    >>> policy = PairLogprobs(torch.tensor([-3.0]), torch.tensor([-5.0]), one, one)
    >>> ipo(policy, policy, beta=0.5)
    tensor([1.])
    """
    return (policy.margin_P - reference.margin_P - 1 / (2 * beta)) ** 2


def kto(
    log_ratio_D: Tensor,
    desirable_D: Tensor,
    divergence: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization, ``w (1 - sigmoid(+-beta (log r - z)))`` per completion, ``(D,)``.

    The completions do not have to be in pairs. The sign is plus for a desirable completion and minus for an undesirable
    one.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306),
    equations 7 and 8.

    Args:
        log_ratio_D: nats, ``(D,)``: log-probability of each completion under the policy minus that under the reference.
        desirable_D: bool ``(D,)``, True for a desirable completion.
        divergence: z, the policy's KL divergence from the reference, 0-d, nats; detached and clamped to at least 0.
        beta: strength of the pull toward the reference, per nat.
        desirable_weight: weight of the desirable completions.
        undesirable_weight: weight of the undesirable completions.

    >>> kto(torch.tensor([0.0, 0.0]), torch.tensor([True, False]), torch.tensor(0.0))
    tensor([0.5000, 0.5000])
    """
    distance_D = beta * (log_ratio_D - divergence.detach().clamp(min=0))
    weight_D = torch.where(desirable_D, desirable_weight, undesirable_weight).to(log_ratio_D.dtype)
    return weight_D * torch.where(desirable_D, -distance_D, distance_D).sigmoid()

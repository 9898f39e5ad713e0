"""Policy losses with a divergence penalty instead of a clip: dro, stable_reinforce and conservative_ppo.

Symbols: p is the policy in training, q the policy that sampled the tokens, ``r = p / q`` the ratio of a token, A its
advantage and ``sg`` stop-gradient. ``_DT`` is one axis of length N: the tokens of all datums, one after the other.
"""

from __future__ import annotations

from torch import Tensor

from objectives.losses.policy.importance_weighted import importance_sampling
from objectives.losses.policy.ratios import token_log_ratios


def dro(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor, *, beta: float = 0.05) -> Tensor:
    """Direct reward optimization with a quadratic penalty, ``-sum(A log p - beta/2 (log p - log q)^2)``.

    The penalty applies to every token, including tokens with advantage 0. If prompt tokens carry a placeholder sampling
    logprob, replace it by the model's own logprob or remove these tokens. The result is 0-d.

    Source: Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models
    Alignment" (arXiv:2405.19107), in the form of the Tinker documentation: the advantage replaces reward minus value,
    and the default of ``beta`` is that of its example.

    Args:
        logprobs_DT: log p of each token, nats, ``(N,)``.
        sampling_logprobs_DT: log q of each token, nats, ``(N,)``.
        advantages_DT: ``(N,)``.
        beta: strength of the penalty, per nat, at least 0.

    >>> import torch
    >>> dro(torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([2.0]), beta=0.5)
    tensor(3.)
    """
    log_ratio_DT = logprobs_DT - sampling_logprobs_DT
    return -(advantages_DT * logprobs_DT - beta / 2 * log_ratio_DT**2).sum()


def dro_metrics(
    logprobs_DT: Tensor, _sampling_logprobs_DT: Tensor, advantages_DT: Tensor, **_: float
) -> dict[str, float]:
    """Metric ``policy``: the loss without its penalty, per token."""
    return {"policy": -(advantages_DT * logprobs_DT).sum().item() / max(1, len(logprobs_DT))}


def stable_reinforce(
    logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor, *, kl_coeff: float = 0.01
) -> Tensor:
    """Truncated REINFORCE with a KL penalty, ``sum(-sg[min(r, 1)] A log p + kl_coeff (r - 1 - log r))``.

    The sum is over the tokens of non-zero advantage. The weight is truncated at 1, so no token counts more than it
    would on-policy. The second summand is the k3 estimate of KL(q || p). Its gradient is ``r - 1`` per token, so it is
    0 for ``p = q`` and otherwise pulls p back to q. The result is 0-d.

    The hosted service has a loss with the same name, purpose and parameter, but its formula is not published; values
    differ from this loss.

    Sources: Espeholt et al. 2018, "IMPALA" (arXiv:1802.01561), for the truncated weight; Schulman 2020,
    "Approximating KL Divergence", for k3.

    Args:
        logprobs_DT: log p of each token, nats, ``(N,)``.
        sampling_logprobs_DT: log q of each token, nats, ``(N,)``.
        advantages_DT: ``(N,)``; a token with advantage 0 contributes nothing.
        kl_coeff: weight of the divergence, at least 0.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0])
    >>> stable_reinforce(lp, lp, torch.tensor([0.5, 1.0]))
    tensor(2.5000)
    """
    log_ratio_DT = token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT)
    weight_DT = log_ratio_DT.detach().clamp(max=0).exp()
    divergence_DT = log_ratio_DT.exp() - 1 - log_ratio_DT
    return (kl_coeff * divergence_DT - weight_DT * advantages_DT * logprobs_DT).sum()


def stable_reinforce_metrics(
    logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor, **_: float
) -> dict[str, float]:
    """Metric ``policy``: the loss without its divergence, per token."""
    total = stable_reinforce(logprobs_DT, sampling_logprobs_DT, advantages_DT, kl_coeff=0.0)
    return {"policy": total.item() / max(1, len(logprobs_DT))}


def conservative_ppo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    kl_coeff: float = 1.0,
    kl_target: float = 0.01,
    cutoff_coeff: float = 1000.0,
) -> Tensor:
    """PPO with a KL penalty and a KL cutoff, ``-sum(r A) + N (kl_coeff KL + cutoff_coeff max(0, KL - 2 kl_target)^2)``.

    KL is the mean of ``r - 1 - log r`` over the N tokens. On tokens of q it is an unbiased estimate of KL(q || p) and
    never negative. Up to twice the target the cost is linear in KL; beyond it, a quadratic cost pushes the update
    back. The factor N keeps the penalty in proportion to the surrogate, which is a sum over tokens. The result is 0-d.

    Source: Heess et al. 2017, "Emergence of Locomotion Behaviours in Rich Environments" (arXiv:1707.02286), algorithm
    1; the defaults are those of the code of Hafner et al. 2017, "TensorFlow Agents" (arXiv:1709.02878). Both adapt
    kl_coeff between updates; here it is constant, because a loss has no state.

    Args:
        logprobs_DT: log p of each token, nats, ``(N,)``.
        sampling_logprobs_DT: log q of each token, nats, ``(N,)``.
        advantages_DT: ``(N,)``; a token with advantage 0 contributes to KL only.
        kl_coeff: cost of the divergence, per nat and token.
        kl_target: nats per token; the quadratic cost starts at twice the target.
        cutoff_coeff: steepness of the quadratic cost, per squared nat and token.

    >>> import torch
    >>> lp, ones = torch.tensor([-1.0, -2.0]), torch.ones(2)
    >>> conservative_ppo(lp, lp, ones), conservative_ppo(lp, lp - 0.5, ones).round(decimals=2)
    (tensor(-2.), tensor(30.1400))
    """
    policy = importance_sampling(logprobs_DT, sampling_logprobs_DT, advantages_DT)
    kl = mean_kl(logprobs_DT, sampling_logprobs_DT)
    excess = (kl - 2 * kl_target).clamp(min=0)
    return len(logprobs_DT) * (kl_coeff * kl + cutoff_coeff * excess**2) + policy


def conservative_ppo_metrics(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    kl_target: float,
    **_: float,
) -> dict[str, float]:
    """Metrics of the parts of the loss.

    ``policy`` is the loss without its penalty, per token, ``kl_q_p`` the divergence in nats per token, and
    ``beyond_cutoff`` is 1 if the divergence exceeds twice the target, else 0.
    """
    kl = mean_kl(logprobs_DT, sampling_logprobs_DT).item()
    policy = importance_sampling(logprobs_DT, sampling_logprobs_DT, advantages_DT).item() / max(1, len(logprobs_DT))
    return {"policy": policy, "kl_q_p": kl, "beyond_cutoff": float(kl > 2 * kl_target)}


def mean_kl(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor) -> Tensor:
    """Estimate KL(q || p) from tokens of q, nats per token, 0-d; 0 if there are no tokens."""
    log_ratio_DT = logprobs_DT - sampling_logprobs_DT
    return (log_ratio_DT.expm1() - log_ratio_DT).sum() / max(1, len(log_ratio_DT))

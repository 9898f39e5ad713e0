"""PPO held by its divergence instead of a clip: a penalty that turns into a wall beyond a limit."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.ratios import token_log_ratios


def conservative_ppo(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    kl_coeff: float = 1.0,
    kl_target: float = 0.01,
    cutoff_coeff: float = 1000.0,
) -> Tensor:
    """``-sum(r A) + N (kl_coeff KL + cutoff_coeff max(0, KL - 2 kl_target)^2)``; 0-d.

    KL is the divergence of the sampling policy from this one, KL(q || p), the mean over the N tokens of
    ``r - 1 - log r``, which on tokens of q is unbiased and never negative. Within twice the target it costs in
    proportion; beyond, a gradient that grows with the excess turns the update back. Times N, so that the penalty keeps
    its size beside a sum over tokens.

    Source: Heess et al. 2017, "Emergence of Locomotion Behaviours in Rich Environments" (arXiv:1707.02286), algorithm
    1; the defaults are those of the code of Hafner et al. 2017, "TensorFlow Agents" (arXiv:1709.02878). There kl_coeff
    is adapted from update to update; here it stays, since a loss has no memory.

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q; ``r = p / q``.
        advantages_DT: ``(N,)``; 0 leaves a token out of the first summand, not out of KL.
        kl_coeff: cost of the divergence, per nat and token.
        kl_target: nats per token; the wall begins at twice as much.
        cutoff_coeff: steepness of the wall, per squared nat and token.

    >>> import torch
    >>> lp, ones = torch.tensor([-1.0, -2.0]), torch.ones(2)
    >>> conservative_ppo(lp, lp, ones), conservative_ppo(lp, lp - 0.5, ones).round(decimals=2)
    (tensor(-2.), tensor(30.1400))
    """
    surrogate = (token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT).exp() * advantages_DT).sum()
    kl = mean_kl(logprobs_DT, sampling_logprobs_DT)
    excess = (kl - 2 * kl_target).clamp(min=0)
    return len(logprobs_DT) * (kl_coeff * kl + cutoff_coeff * excess**2) - surrogate


def conservative_metrics(
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    *,
    kl_target: float,
    **_: float,
) -> dict[str, float]:
    """``kl_q_p``: the divergence, nats per token; ``beyond_wall``: 1 where it is beyond twice the target, else 0."""
    kl = mean_kl(logprobs_DT, sampling_logprobs_DT).item()
    return {"kl_q_p": kl, "beyond_wall": float(kl > 2 * kl_target)}


def mean_kl(logprobs_DT: Tensor, sampling_logprobs_DT: Tensor) -> Tensor:
    """Estimate of KL(q || p), nats per token, 0-d; 0 without a token."""
    log_ratio_DT = logprobs_DT - sampling_logprobs_DT
    return (log_ratio_DT.expm1() - log_ratio_DT).sum() / max(1, len(log_ratio_DT))

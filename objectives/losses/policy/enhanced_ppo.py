"""PPO with a value loss, an entropy bonus and a KL penalty against a reference."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from objectives.losses.policy.importance_weighted import ppo
from objectives.losses.policy.ratios import Threshold


class PpoParts(NamedTuple):
    """Summands of `enhanced_ppo` before their coefficients, sums over tokens, 0-d each.

    Attributes:
        policy: clipped surrogate.
        value: squared errors of the critic; 0 without values.
        entropy: estimated entropy of the policy, nats.
        kl: estimated divergence of the policy from the reference, nats; 0 without a reference.
    """

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor


def enhanced_ppo(  # noqa: PLR0913 - six values per token, two bounds, three coefficients
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    ref_logprobs_DT: Tensor | None = None,
    values_DT: Tensor | None = None,
    returns_DT: Tensor | None = None,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
    value_coeff: float = 0.5,
    entropy_coeff: float = 0.01,
    kl_coeff: float = 0.05,
) -> Tensor:
    """Complete PPO loss, ``policy + value_coeff value - entropy_coeff entropy + kl_coeff kl``; 0-d.

    The summands are sums over tokens. With ``r = p / q``::

        policy  = -min(r A, clip(r, low, high) A)            entropy = -r log p
        value   = (V - R)^2                                  kl      = r (1 / e^d - 1 + d),  d = log p - log ref

    On tokens sampled from q, entropy and kl have unbiased values and gradients for any p, at given preceding tokens.
    Neither accounts for the effect of a token on the distribution of later tokens; the term `kl` does. The gradient of
    kl with respect to ``log p`` is ``r d``, which is 0 for ``p = ref``.

    ``value`` has no gradient with respect to the logprobs: a service returns no hidden states and has no value head, so
    V comes from an external critic, and ``value`` is a metric. In a custom loop with a V that requires grad, ``value``
    trains the critic.

    Sources: Schulman et al. 2017 (arXiv:1707.06347), equation 9; the entropy by importance sampling after Williams &
    Peng 1991; the divergence from a reference of Ziegler et al. 2019 (arXiv:1909.08593), estimated as in DeepSeek-AI
    2025, "DeepSeek-V3.2" (arXiv:2512.02556), section 3.1, "unbiased KL estimate".

    Args:
        logprobs_DT: nats, ``(N,)``, under the policy in training, p.
        sampling_logprobs_DT: nats, ``(N,)``, under the policy that sampled the tokens, q.
        advantages_DT: ``(N,)``, such as those of `objectives.advantages.compute_gae`; a token with advantage 0 does not
            contribute to ``policy``.
        ref_logprobs_DT: nats, ``(N,)``, under a frozen reference; ``None`` leaves out ``kl``.
        values_DT: ``(N,)``: V, the critic's estimate at each token, in units of reward; ``None``, here or for
            returns_DT, leaves out ``value``.
        returns_DT: ``(N,)``: R, the target of V, such as advantage plus value.
        clip_low_threshold: lower bound of the ratio, at least 0; a number, or ``(N,)``.
        clip_high_threshold: upper bound of the ratio; a number, or ``(N,)``.
        value_coeff: weight of the critic's errors, per squared unit of reward.
        entropy_coeff: weight of the entropy, per nat.
        kl_coeff: weight of the divergence, per nat.

    >>> import torch
    >>> lp, ones = torch.tensor([-1.0, -2.0]), torch.ones(2)
    >>> enhanced_ppo(lp, lp, ones, lp, ones, 2 * ones)  # -2 + 0.5 * 2 - 0.01 * 3 + 0.05 * 0
    tensor(-1.0300)
    """
    inputs = (logprobs_DT, sampling_logprobs_DT, advantages_DT, ref_logprobs_DT, values_DT, returns_DT)
    parts = ppo_parts(*inputs, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold)
    return parts.policy + value_coeff * parts.value - entropy_coeff * parts.entropy + kl_coeff * parts.kl


def enhanced_metrics(  # noqa: PLR0913 - six values per token, two bounds
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    ref_logprobs_DT: Tensor | None,
    values_DT: Tensor | None,
    returns_DT: Tensor | None,
    *,
    clip_low_threshold: Threshold,
    clip_high_threshold: Threshold,
    **_: Threshold,
) -> dict[str, float]:
    """Per-token metrics of the given inputs.

    ``policy`` is the clipped surrogate; ``entropy`` and ``kl_ref`` are in nats, ``critic_error`` in squared reward.
    """
    inputs = (logprobs_DT, sampling_logprobs_DT, advantages_DT, ref_logprobs_DT, values_DT, returns_DT)
    parts = ppo_parts(*inputs, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold)
    count = max(1, len(logprobs_DT))
    metrics = {"policy": parts.policy.item() / count, "entropy": parts.entropy.item() / count}
    if ref_logprobs_DT is not None:
        metrics["kl_ref"] = parts.kl.item() / count
    if values_DT is not None:
        metrics["critic_error"] = parts.value.item() / count
    return metrics


def ppo_parts(  # noqa: PLR0913 - six values per token, two bounds
    logprobs_DT: Tensor,
    sampling_logprobs_DT: Tensor,
    advantages_DT: Tensor,
    ref_logprobs_DT: Tensor | None = None,
    values_DT: Tensor | None = None,
    returns_DT: Tensor | None = None,
    *,
    clip_low_threshold: Threshold = 0.8,
    clip_high_threshold: Threshold = 1.2,
) -> PpoParts:
    """Compute the summands of `enhanced_ppo`; see there for the arguments."""
    bounds = {"clip_low_threshold": clip_low_threshold, "clip_high_threshold": clip_high_threshold}
    ratio_DT = (logprobs_DT - sampling_logprobs_DT).exp()
    value = kl = logprobs_DT.new_zeros(())
    if values_DT is not None and returns_DT is not None:
        value = ((values_DT - returns_DT) ** 2).sum()
    if ref_logprobs_DT is not None:
        # r (1 / e^d - 1 + d), expanded to avoid 1 / e^d, which can overflow where r is 0.
        distance_DT = logprobs_DT - ref_logprobs_DT
        kl = ((ref_logprobs_DT - sampling_logprobs_DT).exp() - ratio_DT * (1 - distance_DT)).sum()
    policy = ppo(logprobs_DT, sampling_logprobs_DT, advantages_DT, **bounds)
    return PpoParts(policy, value, -(ratio_DT * logprobs_DT).sum(), kl)

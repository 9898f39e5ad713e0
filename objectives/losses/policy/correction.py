"""Corrections of policy losses whose samples come from another policy than the one in training.

The sampler differs from the trainer if it is some updates old, or if it computes with other kernels or another
precision. Every correction here is a factor of the advantages, at least 0, so that it works with each loss whose
gradient is proportional to the advantages. Symbols: p is the policy in training, whose logprobs the trainer has just
computed, q the policy that sampled the tokens, A the advantage. With a temperature, top-k or top-p, q is not the
distribution of the sampler's weights, s: importance ratios are ``p / q``, but s measures how far the weights have moved
since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from objectives.errors import ObjectiveError
from objectives.losses.policy.ratios import mean_by_sequence, summed_log_ratios

RatioOf = Literal["loss", "none", "token", "sequence"]
Bound = Literal["truncate", "mask"]

# Losses whose gradient is proportional to the advantages; the others have penalties that depend on the sampler.
CORRECTABLE = frozenset(("importance_sampling", "ppo", "cispo", "gspo", "grpo", "dr_grpo", "dapo"))


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction between sampler and trainer.

    Attributes:
        ratio: ``"loss"`` keeps the importance ratios ``p / q`` of the loss. The other choices replace the sampler's
            logprobs in the loss by the trainer's own (the proximal policy), so that the ratios of the loss are 1. They
            multiply the advantages by 1 (``"none"``), by ``p / q`` of each token (``"token"``), or by ``p / q`` of the
            whole sequence (``"sequence"``).
        bound: ``"truncate"`` clamps the multiplier to ``[low, high]``, ``"mask"`` sets it to 0 outside.
        low, high: bounds of the multiplier.
        sequence_low, sequence_high: sequences whose geometric mean of ``p / q`` is outside are dropped; None for no
            bound.
        off_policy_above: sequences of negative advantage whose mean of ``log s - log p`` is above this many nats are
            dropped; None for none.
        trust_region: tokens that the update would push further away from s, and whose probability already differs by
            more than this from that under s, are dropped; None for none.
    """

    ratio: RatioOf = "loss"
    bound: Bound = "truncate"
    low: float = 0.0
    high: float = 2.0
    sequence_low: float | None = None
    sequence_high: float | None = None
    off_policy_above: float | None = None
    trust_region: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("", self.low, self.high),
            ("sequence_", self.sequence_low or 0.0, self.sequence_high),
        ):
            if not 0 <= low <= (math.inf if high is None else high):
                raise ObjectiveError(
                    f"A correction has {name}low={low:g} and {name}high={high}; set 0 <= {name}low <= {name}high, as "
                    "bounds of p / q and not of its logarithm."
                )

    def changes(self) -> dict[str, str | float]:
        """Return the fields that differ from their defaults.

        >>> Correction(ratio="token", trust_region=0.1).changes()
        {'ratio': 'token', 'trust_region': 0.1}
        """
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @property
    def reads_snapshot(self) -> bool:
        """True if the correction reads log s (see the docstring of this module)."""
        return self.off_policy_above is not None or self.trust_region is not None

    def check_loss(self, name: str) -> None:
        """Check that the gradient of a loss is proportional to the advantages.

        Raises:
            ObjectiveError: the gradient is not proportional to the advantages.
        """
        if name not in CORRECTABLE:
            raise ObjectiveError(
                f"The loss {name!r} has a penalty that depends on the sampler's logprobs, which a correction would "
                f"change; use one of {', '.join(sorted(CORRECTABLE))}, or remove the correction."
            )

    def factors(
        self,
        logprobs_DT: Tensor,
        sampling_logprobs_DT: Tensor,
        advantages_DT: Tensor,
        offsets_D: Tensor | None,
        snapshot_logprobs_DT: Tensor | None = None,
    ) -> Tensor:
        """Compute the factors of the advantages, ``(N,)``, without gradient; 0 for dropped tokens.

        Sources:
            truncation: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS),
                after Espeholt et al. 2018, "IMPALA" (arXiv:1802.01561).
            masks of ratios: Ling team 2025, "Every Step Evolves" (arXiv:2510.18855), IcePop, for tokens.
            off_policy_above: DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv:2512.02556), off-policy sequence masking.
            trust_region: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", DPPO with the
                total variation of the sampled token against the others.

        Args:
            logprobs_DT: log p of the trained tokens, nats, ``(N,)``.
            sampling_logprobs_DT: log q, nats, ``(N,)``.
            advantages_DT: ``(N,)``.
            offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; None for one sequence.
            snapshot_logprobs_DT: log s, nats, ``(N,)``; None if s is q.

        >>> correction = Correction(ratio="token", high=2.0)
        >>> p, q = torch.tensor([0.5, 0.9]).log(), torch.tensor([0.25, 0.1]).log()
        >>> correction.factors(p, q, torch.ones(2), torch.tensor([0, 2]))
        tensor([2., 2.])
        """
        logprobs_DT = logprobs_DT.detach()
        log_ratio_DT = logprobs_DT - sampling_logprobs_DT
        factors_DT = self._multipliers(log_ratio_DT, offsets_D)
        if self.sequence_low is not None or self.sequence_high is not None:
            ratio_DT = _mean(log_ratio_DT, offsets_D).exp()
            if self.sequence_low is not None:
                factors_DT = torch.where(ratio_DT < self.sequence_low, 0.0, factors_DT)
            if self.sequence_high is not None:
                factors_DT = torch.where(ratio_DT > self.sequence_high, 0.0, factors_DT)
        snapshot_DT = sampling_logprobs_DT if snapshot_logprobs_DT is None else snapshot_logprobs_DT
        if self.off_policy_above is not None:
            is_stale_DT = (advantages_DT < 0) & (_mean(snapshot_DT - logprobs_DT, offsets_D) > self.off_policy_above)
            factors_DT = torch.where(is_stale_DT, 0.0, factors_DT)
        if self.trust_region is not None:
            distance_DT = (logprobs_DT.exp() - snapshot_DT.exp()).abs()
            is_outside_DT = (distance_DT > self.trust_region) & (advantages_DT * (logprobs_DT - snapshot_DT) > 0)
            factors_DT = torch.where(is_outside_DT, 0.0, factors_DT)
        return factors_DT

    def _multipliers(self, log_ratio_DT: Tensor, offsets_D: Tensor | None) -> Tensor:
        """Importance ratios within the bounds; 1 if the loss has the ratios itself, or for ``"none"``."""
        if self.ratio in ("loss", "none"):
            return torch.ones_like(log_ratio_DT)
        if self.ratio == "sequence":
            log_ratio_DT = torch.zeros_like(log_ratio_DT) + _sum(log_ratio_DT, offsets_D)
        ratio_DT = log_ratio_DT.exp()
        if self.bound == "truncate":
            return ratio_DT.clamp(self.low, self.high)
        return torch.where((ratio_DT < self.low) | (ratio_DT > self.high), 0.0, ratio_DT)


def _sum(log_ratio_DT: Tensor, offsets_D: Tensor | None) -> Tensor:
    """Sum over each sequence, repeated for its tokens, ``(N,)``; 0-d for one sequence."""
    if offsets_D is None:
        return log_ratio_DT.sum()
    zeros_DT, all_DT = torch.zeros_like(log_ratio_DT), torch.ones_like(log_ratio_DT) > 0
    return summed_log_ratios(log_ratio_DT, zeros_DT, all_DT, offsets_D).repeat_interleave(offsets_D.diff())


def _mean(log_ratio_DT: Tensor, offsets_D: Tensor | None) -> Tensor:
    """Mean over each sequence, repeated for its tokens, ``(N,)``; 0-d for one sequence."""
    if offsets_D is None:
        # Not `mean`, which is NaN without tokens.
        return log_ratio_DT.sum() / torch.ones_like(log_ratio_DT).sum().clamp(min=1)
    all_DT = torch.ones_like(log_ratio_DT) > 0
    return mean_by_sequence(log_ratio_DT, all_DT, offsets_D).repeat_interleave(offsets_D.diff())

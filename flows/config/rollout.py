"""Config of rollouts, shared by the flows that sample from environments."""

from __future__ import annotations

from pydantic import Field

from flows.config.base import Config
from objectives.spec import ObjectiveSpec
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.group_rollout import RetryWholeGroup
from tasks.rl.rollout_source import RolloutSettings

POLICY_LOSS = ObjectiveSpec.model_validate({"base_loss": "importance_sampling"})


class RolloutConfig(Config):
    """Sampling of rollouts from environments."""

    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens per turn.")
    temperature: float = Field(default=1.0, gt=0, le=10, title="Temperature", description="Sampling temperature.")
    max_retries: int = Field(
        default=2,
        ge=0,
        title="Retries",
        description="Maximum retries of a group with too few successful rollouts or without rewards, with fresh "
        "environments.",
    )
    min_successful: int | None = Field(
        default=None,
        ge=1,
        title="Minimum successful",
        description="Number of successful rollouts that a group needs. Unset: all of them.",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, title="Time limit (s)", description="Time limit of one attempt at a group. Unset: none."
    )

    def settings(self, seed: int, shape: AdvantageSettings) -> RolloutSettings:
        """Return the settings of a rollout source.

        Args:
            seed: Seed of the run.
            shape: Computation of advantages from rewards.
        """
        strategy = RetryWholeGroup(self.max_retries, self.min_successful, self.timeout_s)
        return RolloutSettings(seed, self.max_tokens, self.temperature, strategy, shape)

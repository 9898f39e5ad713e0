"""How the flows that play environments play them, and what such runs train by unless a config says another."""

from __future__ import annotations

from pydantic import Field

from flows.config import Config
from objectives.spec import ObjectiveSpec
from tasks.advantages import Shape
from tasks.rollout import Patient
from tasks.rollouts import Play

POLICY_LOSS = ObjectiveSpec.model_validate({"base_loss": "importance_sampling"})


class RolloutConfig(Config):
    """How environments are played."""

    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="The most that are sampled in one turn.")
    temperature: float = Field(default=1.0, gt=0, le=10, title="Temperature", description="Of the sampling.")
    max_retries: int = Field(
        default=2,
        ge=0,
        title="Retries",
        description="How often a group with too few successes is played again, with fresh environments.",
    )
    min_successful: int | None = Field(
        default=None,
        ge=1,
        title="Enough members",
        description="Rollouts of a group that are enough where others fail; unset means all of them.",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, title="Time limit (s)", description="Of one attempt at a group; unset is no limit."
    )

    def play(self, seed: int, shape: Shape) -> Play:
        """What plays them.

        Args:
            seed: of the run.
            shape: how rewards become advantages.
        """
        strategy = Patient(self.max_retries, self.min_successful, self.timeout_s)
        return Play(seed, self.max_tokens, self.temperature, strategy, shape)

"""Config of rollouts, shared by the flows that sample from environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, model_validator

from flows.config.base import BuilderConfig, Config
from objectives.spec import ObjectiveSpec
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.custom_completer import CompleterSpec
from tasks.rl.group_rollout import RetryWholeGroup
from tasks.rl.hooks import HookSpec
from tasks.rl.rollout_source import RolloutSettings
from tasks.rl.sampling_distribution import LogprobsOf, SamplingDistribution

POLICY_LOSS = ObjectiveSpec.model_validate({"base_loss": "importance_sampling"})


class RolloutConfig(Config):
    """Sampling of rollouts from environments."""

    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens per turn.")
    temperature: float = Field(default=1.0, gt=0, le=10, title="Temperature", description="Sampling temperature.")
    top_k: int | None = Field(
        default=None, ge=1, title="Top k", description="Sample from this number of likeliest tokens. Unset: from all."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        title="Top p",
        description="Sample from the likeliest tokens up to this probability, counted after the temperature.",
    )
    logprobs: LogprobsOf = Field(
        default="sampled",
        title="Log-probabilities",
        description="Log-probabilities of the samples that losses read. `sampled`: those of the distribution with "
        "`temperature`, `top_k` and `top_p`, computed from the likeliest tokens at each position. `service`: as the "
        "service returns them, which are those of the model itself; losses are then biased.",
    )
    num_candidates: int = Field(
        default=20,
        ge=1,
        title="Candidates",
        description="Likeliest tokens to request at each position if they are needed for `logprobs`.",
    )
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

    completer: BuilderConfig | None = Field(
        default=None,
        title="Completer",
        description="Class or function by its import path that returns a TokenCompleter of tinker-cookbook, which "
        "samples in place of the service. It may take sampling_client, max_tokens, temperature and seed. Unset: the "
        "service samples.",
    )
    hook: BuilderConfig | None = Field(
        default=None,
        title="Hook",
        description="Function by its import path that is called after each turn and may add rewards and end the "
        "episode, or a class with the method on_turn_end. Unset: none.",
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # The cache key of a run's teacher data contains this repr: leave out fields that 0.1 did not have at their
        # defaults.
        fields = type(self).model_fields
        new = {"top_k", "top_p", "logprobs", "num_candidates", "completer", "hook"}
        return (
            (name, value) for name, value in super().__repr_args__() if name not in new or value != fields[name].default
        )

    @model_validator(mode="after")
    def _check_distribution(self) -> Self:
        if self.top_k is not None and self.top_p < 1:
            raise ValueError(
                "top_k and top_p are both set, and services differ in which one they apply first: remove one of them"
            )
        return self

    def settings(self, seed: int, shape: AdvantageSettings) -> RolloutSettings:
        """Return the settings of a rollout source.

        Args:
            seed: Seed of the run.
            shape: Computation of advantages from rewards.

        Raises:
            ConfigError: The completer or the hook cannot be imported or rejects its parameters.
        """
        hook = HookSpec.load(self.hook.builder, self.hook.params) if self.hook else None
        completer = CompleterSpec.load(self.completer.builder, self.completer.params) if self.completer else None
        strategy = RetryWholeGroup(self.max_retries, self.min_successful, self.timeout_s, hook)
        return RolloutSettings(seed, self.max_tokens, self.distribution(), strategy, shape, completer)

    def distribution(self) -> SamplingDistribution:
        """Return the distribution that rollouts are sampled from."""
        return SamplingDistribution(self.temperature, self.top_k, self.top_p, self.num_candidates, self.logprobs)

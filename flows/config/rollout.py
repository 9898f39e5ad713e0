"""Config of rollouts, shared by the flows that sample from environments."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from tinker_cookbook.rl.rollout_limits import DEFAULT_LIMIT_STOP_REASONS, TerminationRewardPolicy
from tinker_cookbook.rl.types import StopReason

from flows.config.base import BuilderConfig, Config, OptionalBuilder
from objectives.config.json_schema import optional_group
from objectives.config.spec import ObjectiveSpec
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollout_source import RolloutSettings
from tasks.rl.rollouts.custom_completer import CompleterSpec
from tasks.rl.rollouts.group_rollout import RetryWholeGroup
from tasks.rl.rollouts.hooks import HookSpec
from tasks.rl.rollouts.sampling_distribution import LogprobsOf, SamplingDistribution
from tasks.rl.rollouts.truncation import OverlongPenalty

# Fields that change the rewards or the choice of the groups that `rl` trains on.
RL_FIELDS = ("termination", "truncated", "refill_rounds", "oversampling_factor")
POLICY_LOSS = ObjectiveSpec.model_validate({"base_loss": "importance_sampling"})


class TerminationConfig(Config):
    """Changes of an episode's reward by the reason for its end: tinker-cookbook's `TerminationRewardPolicy`."""

    zero_reward_on_limit: bool = Field(
        default=False,
        title="No reward at a limit",
        description="If a limit has ended an episode, lower its total reward to at most 0 after it is graded.",
    )
    limit_stop_reasons: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        default=tuple(map(str, DEFAULT_LIMIT_STOP_REASONS)),
        min_length=1,
        title="Limits",
        description="Stop reasons that count as limits for `zero_reward_on_limit`. The environment or the hook "
        "reports the stop reason.",
    )
    skip_grading_on_timeout: bool = Field(
        default=False,
        title="Skip grading on timeout",
        description="If all members of a group have ended with `rollout_timeout`, give them the reward 0 without "
        "grading them. Requires `zero_reward_on_limit`.",
    )
    grader_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        title="Time limit of the grader (s)",
        description="Time limit for computing the rewards of a group. An attempt that exceeds it has failed. Unset: "
        "no limit.",
    )

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if not self.zero_reward_on_limit and self.limit_stop_reasons != tuple(DEFAULT_LIMIT_STOP_REASONS):
            raise ValueError(
                "limit_stop_reasons has no effect without zero_reward_on_limit: set zero_reward_on_limit to true, or "
                "remove limit_stop_reasons"
            )
        counts = self.zero_reward_on_limit and StopReason.ROLLOUT_TIMEOUT in self.limit_stop_reasons
        if self.skip_grading_on_timeout and not counts:
            raise ValueError(
                "skip_grading_on_timeout requires zero_reward_on_limit and rollout_timeout in limit_stop_reasons, "
                "because only then is the reward known: set both, or remove it"
            )
        if not self.zero_reward_on_limit and self.grader_timeout_seconds is None:
            raise ValueError("it has no field with an effect: set zero_reward_on_limit or grader_timeout_seconds")
        return self

    def policy(self) -> TerminationRewardPolicy:
        """Return tinker-cookbook's policy."""
        return TerminationRewardPolicy(**self.model_dump())


class OverlongConfig(Config):
    """Penalty for completions near the token limit: DAPO's soft overlong punishment (arXiv:2503.14476)."""

    penalty: float = Field(
        default=1.0,
        gt=0,
        title="Penalty",
        description="Reward that a completion loses at `max_tokens` tokens.",
    )
    length: int = Field(
        ge=1,
        title="Length",
        description="Number of tokens before `max_tokens` over which the penalty rises linearly from 0.",
    )


class RolloutConfig(Config):
    """Sampling of rollouts from environments."""

    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens per turn.")
    temperature: float = Field(default=1.0, gt=0, le=10, title="Temperature", description="Sampling temperature.")
    top_k: int | None = Field(
        default=None,
        ge=1,
        title="Top k",
        description="Sample only from this number of likeliest tokens. Unset: from all tokens.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        title="Top p",
        description="Sample only from the likeliest tokens up to this total probability, computed after the "
        "temperature is applied.",
    )
    logprobs: LogprobsOf = Field(
        default="sampled",
        title="Log-probabilities",
        description="Log-probabilities of samples that losses read. `sampled`: under the distribution that was "
        "sampled from (with `temperature`, `top_k` and `top_p`), computed from the likeliest tokens at each position. "
        "`service`: under the model itself, as the service returns them; losses are then biased.",
    )
    num_candidates: int = Field(
        default=20,
        ge=1,
        title="Candidates",
        description="Number of likeliest tokens to request at each position, at least `top_k`, if `logprobs` needs "
        "them.",
    )
    max_retries: int = Field(
        default=2,
        ge=0,
        title="Retries",
        description="Maximum number of retries, with fresh environments, of a group with too few successful rollouts "
        "or without rewards.",
    )
    min_successful: int | None = Field(
        default=None,
        ge=1,
        title="Minimum successful",
        description="Number of successful rollouts that a group needs. Unset: all of them.",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        title="Time limit (s)",
        description="Time limit for one attempt at sampling a group. Unset: no limit.",
    )

    completer: OptionalBuilder = Field(
        default=None,
        json_schema_extra=optional_group(BuilderConfig),
        title="Completer",
        description="Import path of a class or function that returns a `TokenCompleter` of tinker-cookbook, which "
        "samples in place of the service. Its optional arguments are `sampling_client`, `max_tokens`, `temperature` "
        "and `seed`. Unset: the service samples.",
    )
    hook: OptionalBuilder = Field(
        default=None,
        json_schema_extra=optional_group(BuilderConfig),
        title="Hook",
        description="Import path of a function that is called after each turn and may add rewards and end the "
        "episode, or of a class with the method `on_turn_end`. Unset: no hook.",
    )
    termination: TerminationConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(TerminationConfig),
        title="Termination",
        description="How the reason for the end of an episode changes its reward, in training and on held-out groups, "
        "such as `{zero_reward_on_limit: true}`. Only for `rl`. Unset: no change.",
    )
    truncated: Literal["train", "mask"] | OverlongConfig = Field(
        default="train",
        title="Truncated completions",
        description="What to do with completions that reach `max_tokens`. `train`: train on them like on others. "
        "`mask`: do not train on rollouts whose last completion is truncated; their rewards still count in their "
        "groups. `{length: 64}`: penalize completions that come within 64 tokens of the limit. Only for `rl`.",
    )
    refill_rounds: int = Field(
        default=0,
        ge=0,
        title="Rounds of refills",
        description="Maximum number of sampling rounds in which the next groups of the data replace groups that "
        "failed or that `advantage.drop_constant` drops, as in DAPO's dynamic sampling. A step samples at most `1 + "
        "refill_rounds` times its number of groups. Only for `rl`. 0: the batch shrinks instead.",
    )

    oversampling_factor: float = Field(
        default=1.0,
        ge=1,
        le=4,
        title="Over-sampling",
        description="Number of groups that a step starts per group that it trains on. The step trains on the groups "
        "that finish first and cancels the others, so it does not wait for the longest completions. Long completions "
        "are then underrepresented. Only for `rl` in the modes `sync` and `stream`. 1: start no extra groups.",
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # The cache key of a run's teacher data contains this repr. It must stay the same as in release 0.1, so leave
        # out each newer field that has its default.
        fields = type(self).model_fields
        new = {"top_k", "top_p", "logprobs", "num_candidates", "completer", "hook", *RL_FIELDS}
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

    @model_validator(mode="after")
    def _check_truncated(self) -> Self:
        if isinstance(self.truncated, OverlongConfig) and self.truncated.length > self.max_tokens:
            raise ValueError(
                f"truncated.length={self.truncated.length} exceeds max_tokens={self.max_tokens}, so that every "
                "completion would be penalized: lower it"
            )
        return self

    def settings(self, seed: int, shape: AdvantageSettings, rewards: Collection[str] = ()) -> RolloutSettings:
        """Return the settings of a rollout source.

        Args:
            seed: Seed of the run.
            shape: Computation of advantages from rewards.
            rewards: Metrics of the environment that are rewards.

        Raises:
            ConfigError: The completer or the hook cannot be imported or rejects its parameters.
        """
        hook = HookSpec.load(self.hook.builder, self.hook.params) if self.hook else None
        completer = CompleterSpec.load(self.completer.builder, self.completer.params) if self.completer else None
        termination = self.termination.policy() if self.termination else None
        overlong = None
        if isinstance(self.truncated, OverlongConfig):
            overlong = OverlongPenalty(self.truncated.penalty, self.truncated.length, self.max_tokens)
        strategy = RetryWholeGroup(
            self.max_retries, self.min_successful, self.timeout_s, hook, termination, overlong, tuple(rewards)
        )
        return RolloutSettings(
            seed,
            self.max_tokens,
            self.distribution(),
            strategy,
            shape,
            completer,
            mask_truncated=self.truncated == "mask",
            refill_rounds=self.refill_rounds,
            oversampling_factor=self.oversampling_factor,
        )

    @property
    def is_plain(self) -> bool:
        """True if the samples follow the model's own distribution."""
        return self.distribution().is_plain and self.completer is None

    def distribution(self) -> SamplingDistribution:
        """Return the distribution that rollouts are sampled from."""
        return SamplingDistribution(self.temperature, self.top_k, self.top_p, self.num_candidates, self.logprobs)

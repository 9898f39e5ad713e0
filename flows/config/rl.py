"""Config of reinforcement learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flows.config.base import BuilderConfig, Config
from flows.config.rollout import POLICY_LOSS, RolloutConfig
from flows.config.train import TrainConfig
from objectives.config.json_schema import optional_group
from objectives.config.spec import ObjectiveSpec
from objectives.losses.policy.correction import CORRECTABLE, Bound, Correction, RatioOf
from objectives.term_weights.schedule import Weight
from objectives.term_weights.targets import TargetSpec, check_weight, unset_weight
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.critic import Critic
from tasks.rl.named_rewards import NamedRewards, Normalization, RewardSpec

# Corrections that `auto` selects in the modes `stream` and `async`, chosen by `python -m benchmarks off_policy`. The
# first is for losses that bound their own ratios, the second for importance_sampling, whose ratios are unbounded.
BOUNDED_CORRECTION = Correction(off_policy_above=0.05)
UNBOUNDED_CORRECTION = Correction(ratio="token", high=2.0, off_policy_above=0.05)


class CriticConfig(Config):
    """Critic of turns: a ridge regression of the return from a turn on, fitted on earlier steps."""

    features: str = Field(
        default="tinker_flows:turn_features",
        title="Features",
        description="Import path of a function of the prompt of a turn and the list of the turns before it, which "
        "returns a list of numbers. The default returns 1 divided by the number of the turn, the sum of the rewards so "
        "far, and the decimal logarithm of the length of the prompt.",
    )
    ridge: float = Field(
        default=1.0,
        gt=0,
        title="Ridge",
        description="Penalty of the squared weights of the regression. The larger it is, the closer the critic stays "
        "to the mean return of the group's other rollouts.",
    )
    steps: int = Field(
        default=4,
        ge=1,
        title="Steps",
        description="Number of steps that the regression remembers: it weighs the turns of a step `1 - 1 / steps` "
        "times as much as the turns of the next step.",
    )


class AdvantageConfig(Config):
    """Estimator that turns rewards into advantages."""

    estimator: Literal["group_mean", "leave_one_out", "per_turn", "discounted", "gae"] = Field(
        default="group_mean",
        title="Estimator",
        description="How each token of a rollout gets its advantage. `group_mean`: total reward of the rollout minus "
        "the group's mean reward. `leave_one_out`: total reward minus the mean reward of the group's other rollouts. "
        "`per_turn`: sum of the rewards from the token's turn onwards minus the mean of this sum over the group's "
        "other rollouts. `discounted`: discounted return at the token minus the mean, over the group, of the return "
        "at the first token. `gae`: generalized advantage estimation with the mean reward of the group's other "
        "rollouts as the value of each token, or over turns with `critic`.",
    )
    scale: bool = Field(
        default=False,
        title="Scale",
        description="Divide the advantages by the standard deviation of the group, as GRPO does; only for "
        "`group_mean`.",
    )
    discount: float = Field(
        default=1.0,
        gt=0,
        le=1,
        title="Discount",
        description="Discount factor per token, for `discounted` and `gae`; per turn with `critic`.",
    )
    decay: float = Field(default=0.95, ge=0, le=1, title="Decay", description="Lambda, for `gae`.")
    critic: CriticConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(CriticConfig),
        title="Critic",
        description="Learned baseline for `gae`, fitted on earlier steps: the expected return from a turn on, given "
        "its prompt and the turns before it. All tokens of a turn get the advantage of the turn. `{}`: a critic with "
        "the defaults. Unset: no critic.",
    )
    drop_constant: bool = Field(
        default=False,
        title="Drop constant groups",
        description="Drop groups whose advantages are all zero. With `group_mean` and `leave_one_out`, these are "
        "groups whose rollouts all have the same reward; with `per_turn`, the same reward at each turn, where a "
        "missing turn has the reward 0.",
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        title="KL in the reward",
        description="Reward penalty per nat of KL divergence from `reference`. Alternatively, the regularizer `kl` "
        "adds the divergence to the loss.",
    )
    kl_discount_factor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        title="KL discount factor",
        description="If above 0, the penalty of a token also includes the penalties of all later tokens of its "
        "completion, discounted by this factor per token, as in tinker-cookbook. 0: only the token's own penalty.",
    )

    @model_validator(mode="after")
    def _check_estimator(self) -> Self:
        if self.scale and self.estimator != "group_mean":
            raise ValueError("scale requires the estimator group_mean: remove scale, or change the estimator")
        if self.discount != 1 and self.estimator not in ("discounted", "gae"):
            raise ValueError(
                "discount requires the estimator discounted or gae: remove discount, or change the estimator"
            )
        if self.decay != type(self).model_fields["decay"].default and self.estimator != "gae":
            raise ValueError("decay requires the estimator gae: remove decay, or change the estimator")
        if self.critic and self.estimator != "gae":
            raise ValueError(
                f"critic requires the estimator gae, but estimator is {self.estimator}: change the estimator, or "
                "remove critic"
            )
        if self.critic and self.drop_constant:
            raise ValueError(
                "drop_constant drops groups whose advantages are all zero, which hardly exist with a critic: remove "
                "one of them"
            )
        if self.kl_discount_factor and not self.kl_coefficient:
            raise ValueError("kl_discount_factor requires a KL penalty: set kl_coefficient above 0")
        return self

    def settings(self) -> AdvantageSettings:
        """Return the settings of advantages.

        Raises:
            ConfigError: the features of the critic cannot be imported.
        """
        critic = Critic.load(**self.critic.model_dump()) if self.critic else None
        return AdvantageSettings(**self.model_dump(exclude={"critic"}), critic=critic)


class NamedRewardConfig(Config):
    """Weight of a named reward."""

    weight: Weight | None = Field(
        default=1.0,
        title="Weight",
        description="Factor of the reward, a number or a schedule of at least 0. A reward with a target has none.",
    )
    target: TargetSpec | None = Field(
        default=None,
        json_schema_extra=optional_group(TargetSpec),
        title="Target",
        description="Limit of the mean reward, such as `{at_least: 0.9}`. A controller finds the weight that meets it.",
    )

    _unset_weight = model_validator(mode="before")(unset_weight)
    _check_weight = model_validator(mode="after")(check_weight)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target is not None and self.target.metric is not None:
            raise ValueError("the target of a reward has no metric: remove it, and name the metric as the reward")
        return self


class ModeConfig(Config):
    """Schedule of rollouts and updates within a step."""

    mode: Literal["sync", "stream", "async"] = Field(
        default="sync",
        title="Mode",
        description="`sync` samples all groups of a step, then trains. `stream` trains on each minibatch as soon as "
        "its groups are sampled. `async` samples the groups of later steps during training, with older weights.",
    )
    groups_per_batch: int | None = Field(
        default=None,
        ge=1,
        title="Groups per step",
        description="Number of groups per step, taken in the order of the builder's data. Unset: the batch size of "
        "the builder.",
    )
    num_minibatches: int = Field(
        default=1,
        ge=1,
        title="Minibatches",
        description="Minibatches per update; their gradients accumulate. Not for mode `sync`.",
    )
    num_substeps: int = Field(
        default=1,
        ge=1,
        title="Updates",
        description="Optimizer updates per step, each on a nearly equal share of the groups.",
    )
    max_steps_off_policy: int = Field(
        default=1,
        ge=1,
        title="Steps off-policy",
        description="For mode `async`: maximum age, in steps, of the weights from which a group was sampled. Older "
        "groups are sampled again.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode == "sync" and self.num_minibatches > 1:
            raise ValueError(
                "num_minibatches requires the mode stream or async: remove num_minibatches, or change the mode"
            )
        if self.mode == "stream" and self.num_minibatches == 1:
            raise ValueError("the mode stream requires several minibatches: set num_minibatches to 2 or more")
        if self.mode != "async" and self.max_steps_off_policy > 1:
            raise ValueError(
                "max_steps_off_policy requires the mode async: remove max_steps_off_policy, or change the mode"
            )
        return self


class CorrectionConfig(Config):
    """Correction of the base loss for samples of other weights, or of another engine, than the trainer's.

    In the descriptions, ``r`` is the trainer's probability of a token divided by the sampler's.
    """

    ratio: RatioOf = Field(
        default="loss",
        title="Ratio",
        description="`loss`: the base loss keeps its importance ratios relative to the sampler. With any other value, "
        "the base loss uses recomputed log-probabilities in place of the sampler's, and the advantages are multiplied "
        "by 1 (`none`), by `r` of the token (`token`), or by the product of `r` over the sequence (`sequence`). `r` "
        "is the trainer's probability of a token divided by the sampler's.",
    )
    bound: Bound = Field(
        default="truncate",
        title="Bound",
        description="`truncate`: clamp the multiplier of the advantages to `low` and `high`, as TIS does. `mask`: set "
        "a multiplier outside of `low` and `high` to 0, as IcePop does.",
    )
    low: float = Field(default=0.0, ge=0, title="Low", description="Lower bound of the multiplier of the advantages.")
    high: float = Field(default=2.0, gt=0, title="High", description="Upper bound of the multiplier of the advantages.")
    sequence_low: float | None = Field(
        default=None,
        ge=0,
        title="Sequence low",
        description="Drop sequences whose geometric mean of `r` is lower. Unset: drop none.",
    )
    sequence_high: float | None = Field(
        default=None,
        gt=0,
        title="Sequence high",
        description="Drop sequences whose geometric mean of `r` is higher. Unset: drop none.",
    )
    off_policy_above: float | None = Field(
        default=None,
        ge=0,
        title="Off-policy above",
        description="Drop sequences of negative advantage whose mean of `-log r` is above this many nats, as "
        "DeepSeek-V3.2 does. Here `r` uses the sampler's probability at temperature 1, without top-k and top-p. Unset: "
        "drop none.",
    )
    trust_region: float | None = Field(
        default=None,
        gt=0,
        le=1,
        title="Trust region",
        description="Drop tokens whose probability differs by more than this from the sampler's at temperature 1, "
        "without top-k and top-p (total variation, as in DPPO), if the update would increase the difference. Unset: "
        "drop none.",
    )

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        bounds = {"bound", "low", "high"} & self.model_fields_set
        if bounds and self.ratio not in ("token", "sequence"):
            raise ValueError(
                f"{sorted(bounds)[0]} bounds the multiplier of the ratio token or sequence: set ratio, or remove it"
            )
        if self.correction() == Correction():
            raise ValueError("it has no field that changes the loss: set one of them, or set correction to none")
        return self

    def correction(self) -> Correction:
        """Return the correction of a base loss."""
        return Correction(**self.model_dump())


class HealthConfig(Config):
    """Limits beyond which a run warns."""

    patience: int = Field(
        default=5,
        ge=1,
        title="Patience",
        description="Number of consecutive steps beyond a limit that cause a warning. Also the number of steps at the "
        "start with which later steps are compared.",
    )
    entropy_below: float = Field(
        default=0.1,
        ge=0,
        title="Entropy below",
        description="The run warns if the entropy of the samples falls below this share of the entropy at the start.",
    )
    mismatch_above: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        title="Mismatch above",
        description="Value of the metric `mismatch/kl_k3`, in nats per token, above which the run warns. `auto`: in "
        "mode `sync` with one update per step, 0.005 for a dense model and 0.05 for a mixture of experts; otherwise "
        "0.1, because samples may be older than the weights. With `rollout.completer`, no limit, because its "
        "distribution may differ from the model's.",
    )
    truncated_above: float = Field(
        default=0.5,
        ge=0,
        title="Truncated above",
        description="Share of truncated completions above which the run warns.",
    )
    constant_above: float = Field(
        default=0.9,
        ge=0,
        title="Constant above",
        description="Share of groups with equal rewards above which the run warns.",
    )
    length_factor: float = Field(
        default=3.0,
        gt=1,
        title="Length factor",
        description="The run warns if the reward rises while completions have grown or shrunk by more than this factor "
        "since the start.",
    )
    repetition_above: float = Field(
        default=0.5,
        ge=0,
        title="Repetition above",
        description="Share of repeated 4-grams above which the run warns if the reward rises.",
    )
    stale_above: float = Field(
        default=0.5,
        ge=0,
        title="Stale above",
        description="Share of groups that are too old to train on, above which the run warns.",
    )
    skipped_above: float = Field(
        default=0.1,
        ge=0,
        title="Skipped above",
        description="Share of groups whose environments fail, above which the run warns.",
    )
    environment_above: float = Field(
        default=0.9,
        ge=0,
        title="Environment above",
        description="Share of the rollouts' time that environments take, above which the run warns if they take more "
        "than one second.",
    )
    logprob_error_above: float = Field(
        default=0.05,
        ge=0,
        title="Error of log-probabilities above",
        description="Value of the metric `rollout/logprob_error`, in nats, above which the run warns.",
    )
    hang_seconds: float = Field(
        default=60.0,
        gt=0,
        title="Hang seconds",
        description="Minimum number of seconds without a response of a group's environment, reward, hook or completer "
        "after which the group counts as hanging. `rollout.timeout_s`, which ends long rollouts, is added to this "
        "number.",
    )
    hang_factor: float = Field(
        default=10.0,
        gt=1,
        title="Hang factor",
        description="A group must also be without a response for this multiple of the median duration of a group to "
        "count as hanging. Before the first group has finished, the factor applies to `hang_seconds`.",
    )


class RlConfig(TrainConfig):
    """Reinforcement learning run."""

    environment: BuilderConfig = Field(
        title="Environment", description="`RLDatasetBuilder` of tinker-cookbook and its parameters."
    )
    rollout: RolloutConfig = Field(
        default=RolloutConfig(), title="Rollouts", description="Sampling of rollouts from the environments."
    )
    advantage: AdvantageConfig = Field(
        default=AdvantageConfig(), title="Advantages", description="Computation of advantages from rewards."
    )
    rewards: dict[str, NamedRewardConfig] = Field(
        default={},
        title="Rewards",
        description="Rewards to train on, such as `{correct: {weight: 1.0}, format: {weight: 0.2}}`. A name is a "
        "metric that the environment reports, or `total` for the environment's own total reward. Empty: `total` alone.",
    )
    reward_normalization: Normalization = Field(
        default="sum",
        title="Normalization of rewards",
        description="`sum`: add the weighted rewards. `decoupled`: normalize each reward within its group, add the "
        "weighted results, and normalize the sum over the minibatch, as GDPO does.",
    )
    schedule: ModeConfig = Field(
        default=ModeConfig(), title="Schedule", description="Order of rollouts and updates within a step."
    )
    correction: Literal["auto", "none"] | CorrectionConfig = Field(
        default="auto",
        title="Correction",
        description="Correction of the base loss for differences between sampler and trainer. `auto`: in the modes "
        "`stream` and `async`, `{off_policy_above: 0.05}` (not with `rollout.completer`), and for the base loss "
        "`importance_sampling` also `{ratio: token, high: 2.0}`; no correction in the mode `sync`, and none for losses "
        "with a penalty that depends on the sampler.",
    )
    health: HealthConfig | None = Field(
        default=HealthConfig(),
        title="Health",
        description="Limits of metrics. Beyond a limit, the run warns. `null` disables the warnings.",
    )
    transcripts_every: int = Field(
        default=20,
        ge=0,
        title="Transcripts every",
        description="Steps between transcript pages. A page is written to the run's directory and to MLflow, together "
        "with a trace of each group. 0 disables transcripts.",
    )
    compute_post_kl: bool = Field(
        default=False,
        title="KL after the update",
        description="Score the samples of each step again after the update, at the price of prompt tokens, and log "
        "`kl_pre_post_v1` and `kl_pre_post_v2`, which measure how far the update moved the policy.",
    )
    objective: ObjectiveSpec = Field(
        default=POLICY_LOSS,
        title="Objective",
        description="Base loss that reads advantages, and weighted regularizers.",
    )

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.reward_normalization == "decoupled" and not self.rewards:
            raise ValueError("reward_normalization is decoupled, but there are no named rewards: set rewards")
        if self.reward_normalization == "decoupled" and self.advantage.estimator != "group_mean":
            raise ValueError(
                f"reward_normalization is decoupled, which normalizes within groups, but advantage.estimator is "
                f"{self.advantage.estimator}: use the estimator group_mean, or the normalization sum"
            )
        return self

    @model_validator(mode="after")
    def _check_refill(self) -> Self:
        if self.rollout.refill_rounds and not self.advantage.drop_constant:
            raise ValueError(
                "rollout.refill_rounds replaces the groups that advantage.drop_constant drops: set drop_constant to "
                "true, or remove refill_rounds"
            )
        return self

    @model_validator(mode="after")
    def _check_oversampling(self) -> Self:
        if self.rollout.oversampling_factor > 1 and self.schedule.mode == "async":
            raise ValueError(
                "rollout.oversampling_factor requires the mode sync or stream, because async steps never wait for the "
                "longest completions: remove it, or change the mode"
            )
        return self

    def base_correction(self) -> Correction | None:
        """Return the correction of the base loss; None if the loss is not corrected."""
        match self.correction:
            case CorrectionConfig() as config:
                return config.correction()
            case "auto" if self.schedule.mode != "sync":
                base = self.objective.base_loss
                name = base if isinstance(base, str) else base.name
                if name not in CORRECTABLE:
                    return None
                automatic = UNBOUNDED_CORRECTION if name == "importance_sampling" else BOUNDED_CORRECTION
                if self.rollout.completer:
                    # A completer may sample from a distribution of its own, whose distance from the weights is not
                    # caused by their age.
                    automatic = replace(automatic, off_policy_above=None)
                return automatic if automatic.changes() else None
        return None

    def named_rewards(self) -> NamedRewards | None:
        """Return the named rewards; None to train on the environments' total reward."""
        specs = {name: RewardSpec(reward.weight or 0.0, reward.target) for name, reward in self.rewards.items()}
        return NamedRewards(specs, self.reward_normalization) if specs else None

    @model_validator(mode="after")
    def _check_guards(self) -> Self:
        schedule = self.schedule
        if self.guards.needs_forward_pass and schedule.num_minibatches * schedule.num_substeps > 1:
            raise ValueError(
                "A guard with the policy skip skips whole steps, which is impossible with several minibatches or "
                "updates per step: use rollback or stop"
            )
        return self

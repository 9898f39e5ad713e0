"""Config of RLHF and its three stages: sft, reward model (dpo or sft) and rl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flows.config.base import RLHF_TAG, BuilderConfig, Config, NamedConfig, OptionalBuilder, TrackedConfig
from flows.config.dpo import DpoConfig, VerdictConfig
from flows.config.loader import validate_fields
from flows.config.rl import RlConfig
from flows.config.train import BudgetConfig, SftConfig
from objectives.config.json_schema import optional_group

_COMPARISONS_DATA = "tinker_cookbook.preference.preference_datasets:ChatDatasetBuilderFromComparisons"
_REWARDED = "tasks.rl.environments.reward_model:RewardModelBuilder"
_PREFERRED = "tasks.rl.environments.pairwise:TournamentBuilder"
_PAIRWISE = "tasks.preference.preference_models:PairwiseBuilder"
# Fields that a stage must not set.
_NOT_IN_STAGES = {"run_name", "model", "base_url", "engine", "storage", "tracking", "experiment", "needs_approval"}
# Fields of the reward model's run that are fields of `reward`.
_IN_REWARD = ("batch_size", "max_length", "verdict")
# Fields that every stage inherits.
_INHERITED = (_NOT_IN_STAGES - {"run_name", "needs_approval"}) | {"lora_rank", "seed"}


class RewardConfig(Config):
    """Settings of the reward model stage."""

    kind: Literal["bradley_terry", "pairwise"] = Field(
        default="bradley_terry",
        title="Kind",
        description="`bradley_terry`: score one completion by the log-probability of a verdict, such as `Yes`, after "
        "the completion. `pairwise`: choose the better of two completions, as tinker-cookbook's preference models do.",
    )
    batch_size: int = Field(default=32, ge=1, title="Batch size", description="Pairs per step.")
    max_length: int = Field(
        default=2048,
        ge=2,
        title="Maximum length",
        description="Maximum tokens of a training sequence, which has the prompt, the completion (for `pairwise`, "
        "both completions) and the verdict.",
    )
    verdict: VerdictConfig = Field(
        default=VerdictConfig(),
        title="Verdict",
        description="Question and verdict that `bradley_terry` appends to a completion.",
    )
    training: dict[str, Any] = Field(
        default_factory=dict,
        title="Training",
        description="Additional fields of the stage's `dpo` config, or of its `sft` config for `pairwise`.",
        examples=[{"learning_rate": 3e-4, "register_as": "reward", "promote_if": "test/accuracy > 0.7"}],
    )


class PolicyConfig(Config):
    """Settings of the policy and of its reinforcement learning run."""

    batch_size: int = Field(default=32, ge=1, title="Batch size", description="Prompts per step.")
    group_size: int = Field(default=4, ge=2, title="Group size", description="Completions per prompt.")
    kl_coefficient: float = Field(
        default=0.1,
        ge=0,
        title="KL in the reward",
        description="Reward penalty per nat of KL divergence from the reference: `training.reference`, or else the "
        "warm start, or else the base model. Set it to 0 to use the regularizer `kl` instead.",
    )
    training: dict[str, Any] = Field(
        default_factory=dict,
        title="Training",
        description="Additional fields of the stage's `rl` config, except `environment`.",
    )


class RlhfConfig(TrackedConfig, NamedConfig):
    """RLHF in up to three consecutive runs: warm start, reward model, reinforcement learning."""

    comparisons: BuilderConfig = Field(
        title="Comparisons",
        description="`ComparisonDatasetBuilder` of tinker-cookbook and its parameters. The reward model trains on the "
        "comparisons, and the policy trains on their prompts.",
    )
    renderer_name: str | None = Field(
        default=None,
        title="Renderer",
        description="Chat format of tinker-cookbook. Unset: the format recommended for the model.",
    )
    lora_rank: int = Field(default=32, ge=1, le=4096, title="LoRA rank", description="Rank of the adapters.")
    seed: int = Field(
        default=0, ge=0, title="Seed", description="Seed for the adapters' initialization and the data order."
    )
    warm_start: dict[str, Any] = Field(
        default_factory=dict,
        title="Warm start",
        description="Fields of `sft`, such as `data`. Empty: the policy starts from the base model.",
    )
    reward: RewardConfig = Field(
        default=RewardConfig(),
        title="Reward model",
        description="Reward model. Leave it out if `judge` is set: both together are an error.",
    )
    judge: OptionalBuilder = Field(
        default=None,
        json_schema_extra=optional_group(BuilderConfig),
        title="Judge",
        description="Builder of a tinker-cookbook `PreferenceModel` that replaces the reward model. "
        "`tinker_flows:PromptedJudgeBuilder` prompts a model (parameters `model`, `path`, `criteria` and "
        "`principles`); `tinker_flows:JudgeBuilder` calls a function (parameter `judge`).",
    )
    policy: PolicyConfig = Field(
        default=PolicyConfig(), title="Policy", description="Settings of the reinforcement learning stage."
    )
    needs_approval: bool = Field(
        default=False,
        title="Needs approval",
        description="Ask a person after each stage except the last whether to continue. For a stage with "
        "`register_as`, the question is instead whether to register its checkpoint; if the answer is no, the next "
        "stage does not run either. A flow run of a deployment is suspended until someone submits the form in the "
        "Prefect UI; a run from a terminal asks in the terminal.",
    )

    budget: BudgetConfig = Field(
        default=BudgetConfig(),
        title="Budget",
        description="Time and cost limits of all stages together. Unset: each stage may have its own budget.",
    )
    mlflow_tags: dict[str, str] = Field(
        default_factory=dict, title="MLflow tags", description="Tags of the MLflow runs of all stages."
    )

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        for stage in (self.warm_start, self.reward.training, self.policy.training):
            if forbidden := sorted(stage.keys() & _NOT_IN_STAGES):
                raise ValueError(f"a stage must not set {', '.join(forbidden)}: set it at the top level of the config")
            if "budget" in stage and self.budget != BudgetConfig():
                raise ValueError("budget covers all stages, but a stage has a budget of its own: remove one of them")
            if stage.get("resume") == "never":
                raise ValueError("a stage must not set resume to never, because a restarted rlhf resumes its stages")
            if stage.get("if_exists", "resume") != "resume":
                raise ValueError(
                    "a stage must not set if_exists, because a restarted rlhf would delete its own stages: choose "
                    "another run_name"
                )
        self._check_fixed_fields()
        self.stages()
        if self.judge is not None and self.reward != RewardConfig():
            raise ValueError("judge and reward are both set, but judge replaces the reward model: remove one")
        return self

    def _check_fixed_fields(self) -> None:
        """Reject fields of a stage that the flow sets itself, because they would have no effect."""
        is_pairwise = self.reward.kind == "pairwise"
        fixed_in_policy = ["environment", *(["init_from"] if self.warm_start else [])]
        fixed_in_reward = ["data"] if is_pairwise else ["comparisons", "renderer_name", *_IN_REWARD]
        for place, stage, fixed in (
            ("policy.training", self.policy.training, fixed_in_policy),
            ("reward.training", self.reward.training, fixed_in_reward),
        ):
            for name in fixed:
                if name in stage:
                    remedy = f"set reward.{name} instead" if name in _IN_REWARD else "remove it"
                    raise ValueError(f"{place} must not set {name}, which follows from the other fields: {remedy}")

    def stages(self) -> list[SftConfig | DpoConfig | RlConfig]:
        """Return the configs of all stages in order, with empty paths in place of the earlier stages' weights."""
        warm_start = [self.warm_start_stage()] if self.warm_start else []
        reward = [self.reward_stage()] if self.judge is None else []
        return [*warm_start, *reward, self.policy_stage("", "")]

    def warm_start_stage(self) -> SftConfig:
        """Return the config of the supervised run that the policy starts from."""
        return validate_fields(SftConfig, self._stage_fields("sft", self.warm_start))

    def reward_stage(self) -> DpoConfig | SftConfig:
        """Return the config of the run that trains the reward model."""
        reward, fields = self.reward, self._stage_fields("reward", self.reward.training)
        if reward.kind == "bradley_terry":
            own = {
                "comparisons": self.comparisons,
                "renderer_name": self.renderer_name,
                "batch_size": reward.batch_size,
                "max_length": reward.max_length,
                "verdict": reward.verdict,
            }
            return validate_fields(DpoConfig, {"objective": {"base_loss": "bradley_terry"}} | fields | own)
        common = {"batch_size": reward.batch_size, "max_length": reward.max_length, **self._renderer("renderer_name")}
        # Train on both orders of each pair, because a resumed run would draw different random orders.
        data = {
            "builder": _COMPARISONS_DATA,
            "params": self._comparison_params | {"common_config": common, "swap": True},
        }
        params = {**self.comparisons.model_dump(), "model": self.model, "renderer_name": self.renderer_name}
        ranking = {"builder": "tasks.preference.ranking_evaluator:RankingEvaluator", "params": params}
        evaluators = [*fields.get("evaluators", ()), ranking]
        return validate_fields(SftConfig, fields | {"data": data, "evaluators": evaluators})

    def policy_stage(self, start: str, reward: str) -> RlConfig:
        """Return the config of the run that trains the policy.

        Args:
            start: path of the warm start's weights; empty without a warm start.
            reward: path of the reward model's weights; empty if a judge replaces the reward model.
        """
        params = self._comparison_params | {
            "batch_size": self.policy.batch_size,
            "group_size": self.policy.group_size,
        }
        if self.judge is None and self.reward.kind == "bradley_terry":
            builder = _REWARDED
            params |= {"path": reward, **self.reward.verdict.model_dump(), **self._renderer("renderer_name")}
        else:
            builder = _PREFERRED
            reward_model = BuilderConfig(builder=_PAIRWISE, params={"path": reward, **self._renderer("renderer_name")})
            params |= _nested("preference_model_builder", self.judge or reward_model)
            params |= self._renderer("policy_renderer_name")
        environment = {"builder": builder, "params": params}
        fields: dict[str, Any] = self._stage_fields("policy", self.policy.training)
        if start:  # the stage may name another reference, but no other initial weights
            fields = {"reference": start} | fields | {"init_from": start}
        advantage = {"kl_coefficient": self.policy.kl_coefficient} | fields.get("advantage", {})
        return validate_fields(RlConfig, fields | {"environment": environment, "advantage": advantage})

    @property
    def _comparison_params(self) -> dict[str, Any]:
        return _nested("comparison_builder", self.comparisons)

    def _renderer(self, name: str) -> dict[str, str]:
        return {name: self.renderer_name} if self.renderer_name else {}

    def _stage_fields(self, stage: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a stage: the fields that it inherits, overridden by its own."""
        tags = {RLHF_TAG: self.run_name} | self.mlflow_tags
        own_tags = own.get("mlflow_tags", {})
        approval = {"needs_approval": True} if self.needs_approval and own.get("register_as") else {}
        inherited = self.model_dump(include=_INHERITED) | {"run_name": f"{self.run_name}-{stage}"}
        # If `mlflow_tags` is no mapping, the validation of the stage's config rejects it.
        all_tags = tags | own_tags if isinstance(own_tags, dict) else own_tags
        return inherited | approval | dict(own) | {"mlflow_tags": all_tags}


def _nested(name: str, config: BuilderConfig) -> dict[str, Any]:
    """Return the parameters that pass one builder to another."""
    return {name: config.builder} | {f"{name}.{key}": value for key, value in config.params.items()}

"""The config of RLHF, and the config of each of its stages, which are runs of sft, dpo and rl."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flows.config import BuilderConfig, Config, NamedConfig, TrackedConfig
from flows.config_file import validate_fields
from flows.dpo import DpoConfig, VerdictConfig
from flows.rl import RlConfig
from flows.sft import SftConfig

_WRITTEN = "tinker_cookbook.preference.preference_datasets:ChatDatasetBuilderFromComparisons"
_REWARDED = "tasks.environments.rewarded:RewardedBuilder"
_PREFERRED = "tasks.environments.preferred:PreferredBuilder"
_PAIRWISE = "tasks.preference_models:PairwiseBuilder"
# What all stages have in common, and what a stage may have otherwise.
_COMMON = {"run_name", "model", "base_url", "engine", "storage", "tracking", "experiment"}
_SHARED = (_COMMON - {"run_name"}) | {"lora_rank", "seed"}


class RewardConfig(Config):
    """How the reward model is trained, on the comparisons."""

    kind: Literal["bradley_terry", "pairwise"] = Field(
        default="bradley_terry",
        title="Kind",
        description="`bradley_terry` scores one answer, by the log-probability of a verdict behind it; `pairwise` says "
        "which of two answers is better, as tinker-cookbook's preference models do.",
    )
    batch_size: int = Field(default=32, ge=1, title="Batch size", description="Pairs of one step.")
    max_length: int = Field(
        default=2048, ge=2, title="Longest", description="Tokens of what is judged, with its verdict."
    )
    verdict: VerdictConfig = Field(
        default=VerdictConfig(), title="Verdict", description="What `bradley_terry` asks for behind an answer."
    )
    training: dict[str, Any] = Field(
        default_factory=dict,
        title="Training",
        description="Further fields of `dpo` or, where it is pairwise, of `sft`.",
        examples=[{"learning_rate": 3e-4, "register_as": "reward", "promote_if": "test/accuracy > 0.7"}],
    )


class PolicyConfig(Config):
    """How the policy is trained, on the prompts of the comparisons."""

    batch_size: int = Field(default=32, ge=1, title="Batch size", description="Prompts of one step.")
    group_size: int = Field(default=4, ge=2, title="Answers", description="To each prompt.")
    kl_coefficient: float = Field(
        default=0.1,
        ge=0,
        title="KL in the reward",
        description="What a nat of distance from the warm start costs; 0 where the term `kl` has it in the loss.",
    )
    training: dict[str, Any] = Field(
        default_factory=dict, title="Training", description="Further fields of `rl`, without the environment."
    )


class RlhfConfig(TrackedConfig, NamedConfig):
    """A warm start, a reward model, and reinforcement learning against it: up to three runs, one after the other."""

    comparisons: BuilderConfig = Field(
        title="Comparisons",
        description="A tinker-cookbook ComparisonDatasetBuilder and its parameters: the reward model learns which "
        "answers are better, and the policy is asked its prompts.",
    )
    renderer_name: str | None = Field(
        default=None,
        title="Renderer",
        description="The chat format of tinker-cookbook; unset is the one that the model was made with.",
    )
    lora_rank: int = Field(default=32, ge=1, title="LoRA rank", description="Rank of the adapters.")
    seed: int = Field(default=0, ge=0, title="Seed", description="Of the adapters' start and the order of the data.")
    warm_start: dict[str, Any] = Field(
        default_factory=dict,
        title="Warm start",
        description="Fields of `sft`, as `data`; without any the policy starts from the model as it is.",
    )
    reward: RewardConfig = Field(
        default=RewardConfig(), title="Reward model", description="Plays no part where there is a judge."
    )
    judge: BuilderConfig | None = Field(
        default=None,
        title="Judge",
        description="In place of a reward model: what makes a tinker-cookbook PreferenceModel, such as "
        "`tasks.preference_models:AskedBuilder` for a model that is asked, with `model` and `path`, or "
        "`tasks.preference_models:JudgeBuilder` for a function, with `judge`.",
    )
    policy: PolicyConfig = Field(default=PolicyConfig(), title="Policy", description="Of the reinforcement learning.")

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        for own in (self.warm_start, self.reward.training, self.policy.training):
            if common := sorted(own.keys() & _COMMON):
                raise ValueError(f"{', '.join(common)} of a stage is that of all of them: set it beside the stages")
        self.policy_stage("", "")
        if self.warm_start:
            self.warm_start_stage()
        if self.judge is None:
            self.reward_stage()
        elif self.reward != RewardConfig():
            raise ValueError("with a judge no reward model is trained: leave out reward, or the judge")
        return self

    def warm_start_stage(self) -> SftConfig:
        """The run that the policy starts from."""
        return validate_fields(SftConfig, self._shared("sft") | self.warm_start)

    def reward_stage(self) -> DpoConfig | SftConfig:
        """The run that makes the reward model."""
        reward, shared = self.reward, self._shared("reward") | self.reward.training
        if reward.kind == "bradley_terry":
            own = {
                "comparisons": self.comparisons,
                "renderer_name": self.renderer_name,
                "batch_size": reward.batch_size,
                "max_length": reward.max_length,
                "verdict": reward.verdict,
            }
            return validate_fields(DpoConfig, {"objective": {"base_loss": "bradley_terry"}} | shared | own)
        written = {"batch_size": reward.batch_size, "max_length": reward.max_length, **self._rendered("renderer_name")}
        # In both orders: which one a row has would else be drawn anew by a resumed run.
        data = {"builder": _WRITTEN, "params": self._compared | {"common_config": written, "swap": True}}
        asked = {**self.comparisons.model_dump(), "model": self.model, "renderer_name": self.renderer_name}
        ranking = {"builder": "tasks.ranking:Ranking", "params": asked}
        evaluators = [*shared.get("evaluators", ()), ranking]
        return validate_fields(SftConfig, shared | {"data": data, "evaluators": evaluators})

    def policy_stage(self, start: str, reward: str) -> RlConfig:
        """The run that trains the policy.

        Args:
            start: path of the warm start's weights; empty without one.
            reward: path of the reward model's; empty where a judge is in its place.
        """
        params = self._compared | {"batch_size": self.policy.batch_size, "group_size": self.policy.group_size}
        if self.judge is None and self.reward.kind == "bradley_terry":
            builder = _REWARDED
            params |= {"path": reward, **self.reward.verdict.model_dump(), **self._rendered("renderer_name")}
        else:
            builder = _PREFERRED
            trained = BuilderConfig(builder=_PAIRWISE, params={"path": reward, **self._rendered("renderer_name")})
            params |= _nested("preference_model_builder", self.judge or trained)
            params |= self._rendered("policy_renderer_name")
        environment = {"builder": builder, "params": params}
        fields: dict[str, Any] = self._shared("policy") | self.policy.training
        if start:
            fields = {"reference": start} | fields | {"resume": start}
        advantage = {"kl_coefficient": self.policy.kl_coefficient} | fields.get("advantage", {})
        return validate_fields(RlConfig, fields | {"environment": environment, "advantage": advantage})

    @property
    def _compared(self) -> dict[str, Any]:
        return _nested("comparison_builder", self.comparisons)

    def _rendered(self, name: str) -> dict[str, str]:
        return {name: self.renderer_name} if self.renderer_name else {}

    def _shared(self, stage: str) -> dict[str, Any]:
        tags = {"tinker_flows.rlhf": self.run_name}
        return self.model_dump(include=_SHARED) | {"run_name": f"{self.run_name}-{stage}", "mlflow_tags": tags}


def _nested(name: str, config: BuilderConfig) -> dict[str, Any]:
    """A builder as a parameter of another one."""
    return {name: config.builder} | {f"{name}.{key}": value for key, value in config.params.items()}

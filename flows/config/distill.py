"""Configs of distillation: teachers, data and targets."""

from __future__ import annotations

from typing import Any, Self

from pydantic import AliasChoices, Field, model_validator

from flows.config.base import BASE, CHECKPOINT, CHECKPOINT_HELP, BuilderConfig, Config, OptionalBuilder
from flows.config.rollout import POLICY_LOSS, RL_FIELDS, RolloutConfig
from flows.config.train import Candidates, TrainConfig
from objectives.config.json_schema import optional_group
from objectives.config.spec import ObjectiveSpec
from objectives.objective import CROSS_ENTROPY

QUESTIONS = "tasks.distillation.prompts:QuestionsBuilder"
# The template of tinker-cookbook's SDFT.
DEMONSTRATION = (
    "{question}\n\nThis is an example for a response to the question:\n{answer}\n\n"
    "Now answer with a response of your own, including the thinking process."
)


class TeacherConfig(Config):
    """Teacher model; it must have the tokenizer of the trained model."""

    model: str = Field(
        default="",
        title="Model",
        description="Name of the teacher's base model on the service. Empty: the model of the checkpoint's run if "
        "`checkpoint` names a run, otherwise the trained model.",
    )
    checkpoint: str = Field(
        default=BASE,
        title="Checkpoint",
        description=f"{CHECKPOINT_HELP} The name is resolved once, when the run starts.",
        pattern=CHECKPOINT,
    )


class GroupsConfig(Config):
    """Environment groups and their teacher."""

    environment: BuilderConfig = Field(
        title="Environment",
        description="`RLDatasetBuilder` of tinker-cookbook and its parameters. Rewards are logged, and also trained "
        "on if `train_on_rewards` is set. `tinker_flows:QuestionsBuilder` reads questions from a JSONL file.",
    )
    teacher: TeacherConfig = Field(default=TeacherConfig(), title="Teacher", description="Teacher of this dataset.")
    weight: float = Field(
        default=1.0,
        gt=0,
        title="Weight",
        description="Weight of the dataset in each step, relative to the other datasets.",
    )


class TeacherDataConfig(Config):
    """Dataset for off-policy distillation: prompts for the teacher to complete, or sequences for it to score."""

    environment: OptionalBuilder = Field(
        default=None,
        json_schema_extra=optional_group(BuilderConfig),
        title="Environment",
        description="`RLDatasetBuilder` of tinker-cookbook whose prompts the teacher completes. "
        "`tinker_flows:QuestionsBuilder` reads questions from a JSONL file.",
    )
    data: OptionalBuilder = Field(
        default=None,
        json_schema_extra=optional_group(BuilderConfig),
        title="Data",
        description="`SupervisedDatasetBuilder` of tinker-cookbook whose tokens the teacher scores; an alternative to "
        "`environment`.",
    )
    teacher: TeacherConfig = Field(default=TeacherConfig(), title="Teacher", description="Teacher of this dataset.")
    weight: float = Field(
        default=1.0,
        gt=0,
        title="Weight",
        description="Weight of the dataset in each step, relative to the other datasets.",
    )

    def __repr_name__(self) -> str:
        # The cache key of a run's teacher data contains this repr: keep the name of release 0.1.
        return "LessonsConfig"

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.environment is None) == (self.data is None):
            raise ValueError("set either environment, for the teacher to complete, or data, for it to score")
        return self


class DistillConfig(TrainConfig):
    """Distillation run."""

    rollout: RolloutConfig = Field(
        default=RolloutConfig(), title="Rollouts", description="Sampling of completions, by the student or a teacher."
    )
    batch_size: int = Field(
        default=8,
        ge=1,
        title="Batch size",
        description="Groups or sequences per step, over all datasets.",
    )

    @model_validator(mode="after")
    def _check_rollout(self) -> Self:
        fields = RolloutConfig.model_fields
        changed = [name for name in RL_FIELDS if getattr(self.rollout, name) != fields[name].default]
        if changed:
            raise ValueError(f"rollout.{changed[0]} is a setting of rl, which distillation does not use: remove it")
        return self


ONE_TARGET = "top_k=1 would give its only target the weight 1: use 0 to train on the sampled token, or 2 or more"


class SamplingConfig(DistillConfig):
    """Distillation run that trains on the student's own samples."""

    objective: ObjectiveSpec = Field(
        default=POLICY_LOSS,
        title="Objective",
        description="Base loss that reads advantages, and weighted regularizers. With `top_k`, the default base loss "
        "is `cross_entropy`.",
    )
    kl_penalty_coef: float = Field(
        default=1.0,
        gt=0,
        title="KL penalty coefficient",
        description="Weight of the divergence from the teacher in the advantages.",
    )
    kl_discount_factor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        title="KL discount factor",
        description="If above 0, the advantage of a token also includes the divergence of all later tokens of its "
        "completion, discounted by this factor per token. 0: only the token's own divergence.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=64,
        title="Top K",
        description="Train by cross-entropy on the teacher's K most likely tokens at each position of the student's "
        "samples, as in tinker-cookbook's SDFT (whose default is 20). The weights are the teacher's probabilities, "
        "normalized to 1. 0: train on advantages of the sampled tokens.",
    )
    skip_first_n_tokens: int = Field(
        default=3,
        ge=0,
        title="Skip first tokens",
        description="With `top_k`: number of sampled tokens at the start of each completion that are not trained on.",
    )
    compute_post_kl: bool = Field(
        default=False,
        title="KL after the update",
        description="Score the samples of each step again after the update, which is billed as prompt tokens, and log "
        "`kl_pre_post_v1` and `kl_pre_post_v2`, which measure how far the update moved the policy.",
    )

    teacher_sync_every: int = Field(
        default=0,
        ge=0,
        title="Sync teacher every",
        description="Steps between replacements of the teacher's weights by the student's, as in tinker-cookbook's "
        "SDFT. 0 keeps the teacher. Each replacement leaves a copy of the weights on the service, except "
        "with 1, where the teacher is the snapshot from which the step samples.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_objective(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("top_k") and fields.get("objective") is None:
            return {**fields, "objective": {"base_loss": CROSS_ENTROPY}}
        return fields

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k == 1:
            raise ValueError(ONE_TARGET)
        names = ("kl_penalty_coef", "kl_discount_factor", "train_on_rewards")
        fields = type(self).model_fields
        changed = [name for name in names if name in fields and getattr(self, name) != fields[name].default]
        if self.top_k and changed:
            raise ValueError(f"{changed[0]} changes the advantages, but top_k uses none: remove {changed[0]} or top_k")
        if not self.top_k and self.skip_first_n_tokens != fields["skip_first_n_tokens"].default:
            raise ValueError("skip_first_n_tokens requires soft targets: set top_k, or remove it")
        return self

    @model_validator(mode="after")
    def _check_sync(self) -> Self:
        if self.num_steps is not None and self.teacher_sync_every >= self.num_steps:
            raise ValueError(
                f"teacher_sync_every={self.teacher_sync_every} is not reached within num_steps={self.num_steps}: lower "
                "it, or set it to 0"
            )
        return self


class TeacherTargetsConfig(DistillConfig):
    """Distillation run that trains on the teacher's targets."""

    candidates: Candidates = "auto"
    top_k: int = Field(
        default=0,
        ge=0,
        le=64,
        title="Top K",
        description="Number K of target tokens per position. If the teacher samples from its full distribution (at "
        "temperature 1, without `rollout.top_k`, `rollout.top_p` and `rollout.completer`), these are its K - 1 most "
        "likely tokens, weighted by its probabilities, and the sampled token, with weight 1, if it is none of them. "
        "With other sampling, and for data that no teacher wrote, they are its K most likely tokens, with "
        "probabilities normalized to 1. 0: train on the sampled token only.",
    )

    @model_validator(mode="after")
    def _check_several(self) -> Self:
        if self.top_k == 1:
            raise ValueError(ONE_TARGET)
        return self


class HindsightConfig(Config):
    """Context after the user's message in the teacher's prompt, as in SDPO (Hübotter et al. 2026, arXiv:2601.20802)."""

    success_reward: float = Field(
        default=1.0,
        title="Reward of a success",
        description="Minimum total reward of a successful rollout. To score a rollout, the teacher sees the first "
        "successful rollout of the group other than that one.",
    )
    solution: str = Field(
        default="\n\nCorrect solution:\n\n{solution}",
        title="Solution",
        description="Template of the part that shows a successful rollout. `{solution}` is its completion.",
        min_length=1,
    )
    feedback: str = Field(
        default="\n\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback}",
        title="Feedback",
        description="Template of the part that shows the environment's feedback. `{feedback}` is the text label "
        "`feedback` of the rollout's environment.",
        min_length=1,
    )
    closing: str = Field(
        default="\n\nCorrectly solve the original question.\n\n",
        title="End",
        description="Text at the end of the prompt, after both parts.",
    )
    renderer_name: str = Field(
        default="",
        title="Renderer",
        description="Chat format of the environments. Empty: `renderer_name` of the environment, or the format "
        "recommended for the model.",
    )


class OnPolicyConfig(SamplingConfig):
    """On-policy distillation: the student samples, and the teacher scores each token."""

    datasets: tuple[GroupsConfig, ...] = Field(
        min_length=1, title="Datasets", description="Datasets with their teachers, mixed by weight."
    )
    train_on_rewards: bool = Field(
        default=False,
        title="Train on rewards",
        description="Add advantages from the environments' rewards to the advantages from the teacher: the total "
        "reward of a completion minus the mean reward of its group, as in tinker-cookbook.",
    )
    hindsight: HindsightConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(HindsightConfig),
        title="Hindsight",
        description="For each rollout, show the teacher another, successful rollout of the group and the "
        "environment's feedback, as SDPO does. Rollouts that have neither are not trained on. Unset: the teacher sees "
        "only the prompt.",
    )

    @model_validator(mode="after")
    def _check_one_dataset(self) -> Self:
        names = [name for name in ("teacher_sync_every", "hindsight") if getattr(self, name)]
        dataset, *others = self.datasets
        if names and others:
            raise ValueError(f"{names[0]} works with one dataset, but there are {1 + len(others)}: remove the others")
        if self.teacher_sync_every and dataset.teacher.model not in ("", self.model):
            raise ValueError(
                f"teacher_sync_every replaces the teacher's weights, but the teacher is another model, "
                f"{dataset.teacher.model}: remove datasets.0.teacher.model"
            )
        return self


class OffPolicyConfig(TeacherTargetsConfig):
    """Off-policy distillation: the student trains on the teacher's samples, or on its distribution over given data."""

    datasets: tuple[TeacherDataConfig, ...] = Field(
        min_length=1, title="Datasets", description="Datasets with their teachers, mixed by weight."
    )

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k == 0 and any(dataset.data for dataset in self.datasets):
            raise ValueError("a dataset with `data` uses no teacher if top_k is 0: set top_k, or train on it with sft")
        return self


class QuestionsConfig(Config):
    """Questions from the rows of a JSONL file."""

    path: str = Field(title="Path", description="JSONL file with one question per row.", min_length=1)
    test_path: str = Field(default="", title="Test path", description="JSONL file of held-out questions. Empty: none.")
    student_prompt: str = Field(
        validation_alias=AliasChoices("student_prompt", "asked"),  # the name in release 0.1
        default="{question}",
        title="Student prompt",
        description="Template of the student's prompt, with fields of the row in braces.",
        min_length=1,
    )
    renderer_name: str = Field(
        default="",
        title="Renderer",
        description="Chat format of tinker-cookbook. Empty: the format recommended for the model.",
    )
    group_size: int = Field(default=1, ge=1, title="Group size", description="Completions per question.")

    def builder(self, teacher_prompt: str, batch_size: int) -> BuilderConfig:
        """Return the builder of the questions.

        Args:
            teacher_prompt: Template of the teacher's prompt.
            batch_size: Questions per step.
        """
        params: dict[str, Any] = self.model_dump(exclude={"test_path", "renderer_name"})
        optional = {"test_path": self.test_path, "renderer_name": self.renderer_name}
        params |= {name: value for name, value in optional.items() if value}
        return BuilderConfig(
            builder=QUESTIONS, params=params | {"teacher_prompt": teacher_prompt, "batch_size": batch_size}
        )


class SelfConfig(SamplingConfig):
    """Self-distillation: earlier weights of the model, prompted with more context, teach it on its own samples."""

    questions: QuestionsConfig = Field(title="Questions", description="Questions for the student to answer.")
    teacher_prompt: str = Field(
        validation_alias=AliasChoices("teacher_prompt", "shown"),  # the name in release 0.1
        default=DEMONSTRATION,
        title="Teacher prompt",
        description="Template of the teacher's prompt, with fields of the row in braces, such as a reference answer.",
        min_length=1,
    )
    teacher: TeacherConfig = Field(
        default=TeacherConfig(),
        title="Teacher",
        description="Weights that teach, usually earlier weights of the trained model: `base`, or the checkpoint from "
        "which this run starts.",
    )


class PromptConfig(TeacherTargetsConfig):
    """Prompt distillation: the teacher completes with a long prompt, and the student learns to do so without it."""

    questions: QuestionsConfig = Field(title="Questions", description="Questions for the teacher to answer.")
    prompt: str = Field(
        title="Prompt",
        description="Long prompt of the teacher: a system message before the question, or, if it has fields of the "
        "row in braces, the template of the whole prompt.",
        min_length=1,
    )
    teacher: TeacherConfig = Field(
        default=TeacherConfig(), title="Teacher", description="Model that answers the questions, given the prompt."
    )

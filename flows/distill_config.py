"""The configs of distillation: who teaches, on which data, and what of the teacher is learned."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from flows.config import BuilderConfig, Config
from flows.rollout_config import POLICY_LOSS, RolloutConfig
from flows.teachers import TeacherConfig
from flows.train_config import TrainConfig
from objectives.spec import ObjectiveSpec

QUESTIONS = "tasks.questions:QuestionsBuilder"
# As in tinker-cookbook's SDFT.
DEMONSTRATION = (
    "{question}\n\nThis is an example for a response to the question:\n{answer}\n\n"
    "Now answer with a response of your own, including the thinking process."
)


class GroupsConfig(Config):
    """Groups of environments, and who teaches on them."""

    environment: BuilderConfig = Field(
        title="Environment",
        description="A tinker-cookbook RLDatasetBuilder and its parameters; its rewards are shown, and play no part. "
        f"`{QUESTIONS}` takes questions from a JSONL file.",
    )
    teacher: TeacherConfig = Field(default=TeacherConfig(), title="Teacher", description="Who is learned from.")
    weight: float = Field(default=1.0, gt=0, title="Weight", description="Its share of each step, beside the others'.")


class LessonsConfig(Config):
    """Data to learn from: groups that the teacher answers, or sequences that it rates."""

    environment: BuilderConfig | None = Field(
        default=None,
        title="Environment",
        description="A tinker-cookbook RLDatasetBuilder, whose groups the teacher answers; "
        f"`{QUESTIONS}` takes questions from a JSONL file.",
    )
    data: BuilderConfig | None = Field(
        default=None,
        title="Data",
        description="Instead, a SupervisedDatasetBuilder, whose sequences are there; the teacher rates their tokens.",
    )
    teacher: TeacherConfig = Field(default=TeacherConfig(), title="Teacher", description="Who is learned from.")
    weight: float = Field(default=1.0, gt=0, title="Weight", description="Its share of each step, beside the others'.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.environment is None) == (self.data is None):
            raise ValueError("give either an environment, for the teacher to answer, or data, for it to rate")
        return self


class DistillConfig(TrainConfig):
    """A run that learns from a teacher."""

    rollout: RolloutConfig = Field(
        default=RolloutConfig(), title="Rollouts", description="How groups are answered, by student or teacher."
    )
    batch_size: int = Field(
        default=8,
        ge=1,
        title="Batch size",
        description="Groups, or sequences of data, of a step, all datasets together.",
    )


class SamplingConfig(DistillConfig):
    """A run whose student samples what it learns from."""

    objective: ObjectiveSpec = Field(
        default=POLICY_LOSS,
        title="Objective",
        description="The base loss, of those that read advantages, and its weighted regularizers.",
    )


class TaughtConfig(DistillConfig):
    """A run whose teacher says what is learned."""

    top_k: int = Field(
        default=0,
        ge=0,
        le=64,
        title="Top K",
        description="Learn so many tokens at each position by the teacher's probabilities: its likeliest, and of all "
        "others the one that it sampled; 0 learns what it sampled alone.",
    )

    @model_validator(mode="after")
    def _check_several(self) -> Self:
        if self.top_k == 1:
            raise ValueError("top_k is 1, which says nothing of how sure the teacher is: take 2 or more, or 0")
        return self


class OnPolicyConfig(SamplingConfig):
    """On-policy distillation: the student samples, the teacher says how likely it finds each token."""

    datasets: tuple[GroupsConfig, ...] = Field(
        min_length=1, title="Datasets", description="Each with its teacher, mixed by weight."
    )


class OffPolicyConfig(TaughtConfig):
    """Off-policy distillation: the student learns sequences of the teacher's, or the teacher's view of any."""

    datasets: tuple[LessonsConfig, ...] = Field(
        min_length=1, title="Datasets", description="Each with its teacher, mixed by weight."
    )

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k == 0 and any(each.data for each in self.datasets):
            raise ValueError("data without top_k needs no teacher: set top_k, or fine-tune on it with sft")
        return self


class QuestionsConfig(Config):
    """Questions from the rows of a JSONL file."""

    path: str = Field(title="Path", description="JSONL file with a row for each question.", min_length=1)
    test_path: str = Field(default="", title="Test path", description="Held-out rows; empty for none.")
    asked: str = Field(
        default="{question}",
        title="Asked",
        description="What the student is asked, with fields of the row in braces.",
        min_length=1,
    )
    renderer_name: str = Field(
        default="", title="Renderer", description="tinker-cookbook's chat format; empty: the recommended one."
    )
    group_size: int = Field(default=1, ge=1, title="Answers", description="To each question.")

    def builder(self, shown: str, batch_size: int) -> BuilderConfig:
        """What makes them, with what the teacher is shown."""
        params: dict[str, Any] = self.model_dump(exclude={"test_path", "renderer_name"})
        optional = {"test_path": self.test_path, "renderer_name": self.renderer_name}
        params |= {name: value for name, value in optional.items() if value}
        return BuilderConfig(builder=QUESTIONS, params=params | {"shown": shown, "batch_size": batch_size})


class SelfConfig(SamplingConfig):
    """Self-distillation: earlier weights of the model, which are shown more, teach it on what it samples."""

    questions: QuestionsConfig = Field(title="Questions", description="What is answered.")
    shown: str = Field(
        default=DEMONSTRATION,
        title="Shown",
        description="What the teacher is asked instead, with fields of the row in braces: such as an answer to go by.",
        min_length=1,
    )
    teacher: TeacherConfig = Field(
        default=TeacherConfig(),
        title="Teacher",
        description="Earlier weights of the model: `base`, or a checkpoint that this run goes on from.",
    )


class PromptConfig(TaughtConfig):
    """Prompt distillation: the teacher answers with a long prompt, the student learns to do so without it."""

    questions: QuestionsConfig = Field(title="Questions", description="What is answered.")
    prompt: str = Field(
        title="Prompt",
        description="The long prompt: a system message before the question, or with fields of the row in braces all "
        "that the teacher is asked.",
        min_length=1,
    )
    teacher: TeacherConfig = Field(
        default=TeacherConfig(), title="Teacher", description="Who answers with the prompt; the base model by default."
    )

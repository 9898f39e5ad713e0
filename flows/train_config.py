"""The config of a method that trains on the batches of a data source, whatever its data and objective."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from tinker_cookbook.utils.lr_scheduling import LRSchedule

from flows.budget import BudgetConfig
from flows.config import AdamConfig, BuilderConfig, RunConfig
from flows.granularity import Granularity
from flows.guards import GuardConfig
from objectives.spec import ObjectiveSpec

BASE_MODEL = "base"


def _or_auto(schema: JsonDict) -> None:
    """Have a form take the word for the number that it stands for."""
    schema["anyOf"] = [{"type": schema.pop("type")}, {"type": "string", "enum": ["auto"], "title": "By the model"}]


class TrainConfig(RunConfig):
    """A run that trains an adapter, step by step, on the batches of a data source."""

    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec(), title="Objective", description="The base loss and its weighted regularizers."
    )
    reference: str = Field(
        default=BASE_MODEL,
        title="Reference",
        description="The frozen model of terms that measure from one, such as `kl` and `dpo`: `base` is the model "
        "without an adapter, and a `tinker://` path a checkpoint that training could go on from. It is asked once for "
        "each datum.",
        pattern=rf"^({BASE_MODEL}|tinker://.+)$",
    )
    lora_rank: int = Field(default=32, ge=1, title="LoRA rank", description="Rank of the trained adapter.")
    seed: int = Field(default=0, ge=0, title="Seed", description="Of the adapter's start and the order of the data.")
    learning_rate: float = Field(
        default=1e-4,
        gt=0,
        title="Learning rate",
        description="At the first step. `auto` is the published rate for LoRA, by the model's family and hidden size; "
        "the run keeps the number.",
        json_schema_extra=_or_auto,
    )
    lr_schedule: LRSchedule = Field(
        default="linear", title="Learning-rate schedule", description="How it falls to the last step."
    )
    adam: AdamConfig = Field(default=AdamConfig(), title="Optimizer", description="AdamW's other parameters.")
    num_epochs: int = Field(default=1, ge=1, title="Epochs", description="Passes over the data.")
    num_steps: int | None = Field(
        default=None,
        ge=1,
        title="Steps",
        description="Stop after so many steps; unset means after the epochs.",
    )
    eval_every: int = Field(
        default=10,
        ge=0,
        title="Evaluate every",
        description="Steps between evaluations, and at the end; 0 is never.",
    )
    evaluators: tuple[BuilderConfig, ...] = Field(
        default=(),
        title="Evaluators",
        description="tinker-cookbook evaluators beside the held-out `test/nll`.",
    )

    granularity: Granularity = Field(
        default="task",
        title="Granularity",
        description="What has a task run of its own in Prefect: every task of a step, a whole step, or the steps "
        "between two checkpoints. Runs of more than a few thousand steps are better read, and stored, coarsely.",
    )
    guards: GuardConfig = Field(
        default=GuardConfig(), title="Guards", description="What becomes of a step whose loss is not fit to train on."
    )
    budget: BudgetConfig = Field(default=BudgetConfig(), title="Budget", description="Limits in time and dollars.")

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _find_rate(cls, value: object, info: ValidationInfo) -> object:
        if value != "auto" or "model" not in info.data:
            return value
        from flows.learning_rate import recommended_rate  # it takes a second, and few configs ask for it

        return recommended_rate(info.data["model"])

    @field_validator("eval_every")
    @classmethod
    def _check_eval_every(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and info.data.get("promote_if"):
            raise ValueError("promote_if asks for an evaluation: set it above 0")
        return value

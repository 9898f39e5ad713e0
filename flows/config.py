"""Config parts that every method shares: frozen pydantic models, valid as YAML, JSON and a Prefect parameter form."""

from __future__ import annotations

import re
from typing import Any, Literal

from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from tinker import types

from flows.promote_if import check_promote_if
from objectives.form import limits_beside_unions

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
START = "{start}"
RESUME = rf"^(auto|never|tinker://\S+|{NAME}(@(\d+|best|final))?)$"


class Config(BaseModel):
    """A frozen config; a field it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=limits_beside_unions)


class BuilderConfig(Config):
    """An object to build: what, and with which parameters."""

    builder: str = Field(
        title="Builder",
        description="Import path, `package.module:Name`.",
        examples=["tinker_cookbook.supervised.data:FromConversationFileBuilder"],
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        title="Parameters",
        description="Keyword arguments of the builder; they may nest.",
    )


class EngineConfig(Config):
    """The local engine that a run starts for itself where no service is named."""

    dtype: Literal["float32", "bfloat16", "autocast-bf16"] = Field(
        default="float32",
        title="Data type",
        description="Of the base model; adapters stay float32. The bfloat16 ones are faster only on processors with "
        "bfloat16 instructions.",
    )
    threads: int | None = Field(
        default=None, ge=1, title="Threads", description="CPU threads; unset means one per core."
    )
    deterministic: bool = Field(
        default=False,
        title="Deterministic",
        description="Sample each answer to the same bits whatever else is sampled beside it, at up to three times the "
        "time: a killed run that samples from its weights then ends as one that nobody stopped.",
    )


class AdamConfig(Config):
    """The optimizer: AdamW on the service."""

    beta1: float = Field(default=0.9, ge=0, lt=1, title="Beta 1", description="Decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, title="Beta 2", description="Decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, title="Epsilon", description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, title="Weight decay", description="Decoupled, per step.")
    grad_clip_norm: float = Field(
        default=0.0, ge=0, title="Gradient clipping", description="Largest norm of the gradient; 0 is off."
    )

    def at(self, learning_rate: float) -> types.AdamParams:
        """The service's parameters for one step."""
        return types.AdamParams(learning_rate=learning_rate, **self.model_dump())


class KeepBestConfig(Config):
    """The best checkpoint of a run, by a metric of its weights."""

    metric: str = Field(
        title="Metric",
        description="One that is logged at the checkpoints' steps, as `test/nll` where `eval_every` divides "
        "`checkpoint_every`.",
        min_length=1,
        examples=["test/nll"],
    )
    mode: Literal["min", "max"] = Field(
        default="min", title="Mode", description="Whether the best has the smallest or the largest value."
    )


class NamedConfig(Config):
    """What is kept under a name, and goes on under it after a stop."""

    run_name: str = Field(
        title="Run name",
        description="Names the run's directory; the same name again goes on with that run. `{start}` in it becomes the "
        "time for which the flow run was scheduled, so that each one of a deployment is a run of its own.",
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]|\{start\})*$",
        max_length=128,
    )

    @field_validator("run_name")
    @classmethod
    def _fill_in_start(cls, value: str) -> str:
        # The same at every start of one flow run, so that one that crashed finds its record again.
        return value.replace(START, f"{flow_run.scheduled_start_time:%Y%m%d-%H%M%S}") if START in value else value


class PlaceConfig(Config):
    """Where the weights are, and where the records of runs are kept."""

    model: str = Field(
        title="Model",
        description="Base model by the service's name; for the local engine `tiny`, `smollm2-135m` or a directory.",
        min_length=1,
    )
    base_url: str = Field(
        default="",
        title="Tinker service",
        description="A URL, `block:NAME`, or `local` for an engine of the run's own. Empty: TINKER_BASE_URL, "
        "the hosted service where TINKER_API_KEY is set, else local.",
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), title="Local engine", description="How the run's own engine computes."
    )
    storage: str = Field(
        default="",
        title="Run storage",
        description="A directory, s3://bucket/prefix or `block:NAME`. Empty: `runs` in the project's home.",
    )


class TrackedConfig(PlaceConfig):
    """Where what is measured is logged, too."""

    tracking: str = Field(
        default="",
        title="MLflow tracking",
        description="A tracking URI or `block:NAME`. Empty: MLFLOW_TRACKING_URI, else a SQLite file in the project's "
        "home.",
    )
    experiment: str = Field(
        default="tinker-flows", title="Experiment", description="MLflow experiment of the run.", min_length=1
    )


class RunConfig(TrackedConfig, NamedConfig):
    """Where a run happens, where it is kept, and how it goes on after a stop."""

    mlflow_tags: dict[str, str] = Field(
        default_factory=dict,
        title="MLflow tags",
        description="Of the run in MLflow, beside its own; `mlflow.parentRunId` shows it below another run.",
    )
    resume: str = Field(
        default="auto",
        title="Resume",
        description="`auto` goes on from the last checkpoint of the same run name; `never` refuses a name in use. "
        "`RUN`, `RUN@STEP`, `RUN@best` or `RUN@final` forks: this run starts with the weights and the optimizer of "
        "that checkpoint of another run in the same storage, at its step of data and schedules; a `tinker://` path "
        "does so at step 0. A fork that was stopped goes on with itself.",
        pattern=RESUME,
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        title="Restarts",
        description="How often in a row, without a checkpoint between, the run opens its last checkpoint again "
        "after the service was lost; 0 is never.",
    )
    checkpoint_every: int = Field(
        default=10,
        ge=1,
        title="Checkpoint every",
        description="Steps between checkpoints; the last step has one too.",
    )
    keep_last: int | None = Field(
        default=None,
        ge=1,
        title="Keep the last",
        description="Checkpoints that stay on the service, the newest ones, beside the best and the final one; older "
        "ones are deleted there. Unset: all.",
    )
    keep_best: KeepBestConfig | None = Field(
        default=None, title="Keep the best", description="Note the best checkpoint by a metric, and keep it."
    )
    ttl_seconds: int | None = Field(
        default=None,
        ge=3600,
        le=315_360_000,
        title="Time to live (s)",
        description="The service deletes a checkpoint so long after its save, but never the best and the final one. A "
        "run that stands still for longer starts again from nothing. Unset: never.",
    )
    register_as: str | None = Field(
        default=None,
        min_length=1,
        title="Register as",
        description="Model of MLflow's registry that the run's best checkpoint, or without `keep_best` the final one, "
        "becomes a version of when the run is done.",
    )
    promote_if: str | None = Field(
        default=None,
        title="Promote if",
        description="What that checkpoint has to fulfil: a metric of the evaluations, one of < <= > >=, and a number "
        "or `baseline`, which may be multiplied: that metric of the run's first evaluation, before its training.",
        examples=["test/nll < 0.98 * baseline"],
    )

    @field_validator("promote_if")
    @classmethod
    def _check_promote_if(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("register_as"):
            raise ValueError("set register_as too, to the model that the checkpoint becomes a version of")
        return check_promote_if(value)

    @field_validator("resume", mode="before")
    @classmethod
    def _check_resume(cls, value: object) -> object:
        if isinstance(value, str) and not re.fullmatch(RESUME, value):
            raise ValueError("give auto, never, the name of a run, RUN@STEP, RUN@best, RUN@final or a tinker:// path")
        return value

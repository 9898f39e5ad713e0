"""Config parts shared by every method: frozen pydantic models that also render as YAML, JSON and Prefect forms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from prefect.runtime import flow_run
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from tinker import types

from blocks.errors import CredentialsError
from blocks.urls import contains_credentials, has_credentials, hide_credentials
from flows.config.plain_data import check_json_values
from flows.config.promotion import check_approval, check_confidence, check_model_name, check_promote_if
from objectives.config.aliases import with_current_paths
from objectives.config.json_schema import form_fields, optional_group, put_first

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
START = "{start}"
RESUME = rf"^(auto|never|tinker://\S+|{NAME}(@(\d+|best|final))?)$"

BASE = "base"
SERVICE_PATH = "tinker://"
RLHF_TAG = "tinker_flows.rlhf"  # MLflow tag of a stage of rlhf
CHECKPOINT = rf"^({BASE}|tinker://\S+|{NAME}(@(\d+|best|final))?)$"
CheckpointKind = Literal["state", "sampler", "both"]
# Kinds of content whose digests a checkpoint records.
ContentKind = Literal["data", "terms", "evaluators", "environment", "model", "tokenizer"]
CHECKPOINT_HELP = (
    "`RUN` (its newest weights), `RUN@STEP`, `RUN@best` or `RUN@final` of a run in the storage, a `tinker://` path, or "
    "`base`, the model without an adapter."
)


# How to pass credentials to the server that a field names.
_CREDENTIALS_OF = {
    "base_url": "set TINKER_API_KEY, or name a Tinker Service block",
    "storage": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Run Storage block",
    "tracking": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI for a database",
}
_CREDENTIALS_OF_OTHERS = "read it from the environment where it is used"
# Fields that a form shows first: model, data, objective and length of the training.
BASICS = (
    *("run_name", "model", "checkpoint", "baseline", "against", "flow", "base", "space"),
    *("data", "comparisons", "environment", "teachers", "teacher", "questions", "renderer_name"),
    *("learning_rate", "num_steps", "num_epochs", "batch_size", "lora_rank", "objective", "rollout"),
    *("eval_every", "evaluators", "checkpoint_every"),
)


def _form(schema: JsonSchemaValue) -> None:
    """Adapt a schema to Prefect's form."""
    form_fields(schema)
    put_first(schema, BASICS)


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in the fields of a config with their dotted paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | BaseModel):
        for name, item in value.items() if isinstance(value, Mapping) else value:
            yield from _strings(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}.{index}")


def _is_number(annotation: Any) -> bool:
    """Return whether a field takes numbers but no switch, which pydantic would read as 0 or 1."""
    types = get_args(annotation) or (annotation,)
    return bool not in types and (int in types or float in types)


class Config(BaseModel):
    """Frozen config that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_form)

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, fields: Any) -> Any:
        """Check the values, including those nested in `params`, and accept import paths of earlier releases there."""
        if not isinstance(fields, dict):
            return fields
        check_json_values(fields)
        for name, value in fields.items():
            if isinstance(value, bool) and name in cls.model_fields and _is_number(cls.model_fields[name].annotation):
                raise ValueError(f"{name!r} is {value}, but it takes a number")
        return with_current_paths(fields)

    @model_validator(mode="before")
    @classmethod
    def _check_credentials(cls, fields: Any) -> Any:
        """Reject a user name, a password or a secret in a URL: configs are recorded.

        Raises:
            CredentialsError: a string at any depth has one.
        """
        for path, text in _strings(fields, ""):
            # Fields of addresses have a fix. Only there is `user:secret@host`, without a scheme, taken for a URL.
            fix = _CREDENTIALS_OF.get(path)
            if contains_credentials(text) or (fix and has_credentials(text)):
                raise CredentialsError(
                    f"The config is invalid: {path!r} is {hide_credentials(text)!r}, but it has a user name, "
                    f"a password or a secret, which would be recorded: remove it and {fix or _CREDENTIALS_OF_OTHERS}."
                )
        return fields


class BuilderConfig(Config):
    """Import path of a builder and its parameters."""

    builder: str = Field(
        title="Builder",
        description="Import path of a class or function, `package.module:Name`.",
        examples=["tinker_cookbook.supervised.data:FromConversationFileBuilder"],
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        title="Parameters",
        description="Keyword arguments of the builder. An argument can itself be a builder.",
    )


OptionalBuilder = Annotated[BuilderConfig | None, BeforeValidator(lambda value: value or None)]
"""Builder that may be unset. Prefect's form sends an empty mapping for a group that nobody has filled in."""


class EvaluatorConfig(BuilderConfig):
    """Evaluator by the import path of its class or builder."""

    on_error: Literal["raise", "skip"] = Field(
        default="raise",
        title="On error",
        description="What happens if the evaluator fails. `raise`: the run ends. `skip`: the run logs a warning, sets "
        "a tag and continues without the evaluator's metrics. This does not apply to a lost service, after which the "
        "run restarts, nor to NaN and infinity, which `guards` handles.",
    )


class EngineConfig(Config):
    """Settings of the local engine that a run starts if the config names no service."""

    dtype: Literal["float32", "bfloat16", "autocast-bf16"] = Field(
        default="float32",
        title="Data type",
        description="Data type of the base model; adapters stay float32. The bfloat16 types are faster only on "
        "processors with bfloat16 instructions.",
    )
    threads: int | None = Field(default=None, ge=1, title="Threads", description="CPU threads. Unset: one per core.")
    deterministic: bool = Field(
        default=False,
        title="Deterministic",
        description="Make sampling independent of the other requests in the batch, bit for bit; requires float32. "
        "A resumed run then ends with the same weights as an uninterrupted one, even if it uses a reference or samples "
        "from its own weights (modes `sync` and `stream`).",
    )


_NEVER_CLIPS = 1e12


class AdamConfig(Config):
    """AdamW parameters other than the learning rate."""

    beta1: float = Field(default=0.9, ge=0, lt=1, title="Beta 1", description="Decay rate of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, title="Beta 2", description="Decay rate of the second moment.")
    eps: float = Field(
        default=1e-8, gt=0, title="Epsilon", description="Term added to the square root of the second moment."
    )
    weight_decay: float = Field(
        default=0.0, ge=0, title="Weight decay", description="Decoupled weight decay, applied at each step."
    )
    grad_clip_norm: float = Field(
        default=0.0, ge=0, title="Gradient clipping", description="Maximum gradient norm; 0 disables clipping."
    )

    def params(self, learning_rate: float) -> types.AdamParams:
        """Return the service's optimizer parameters for one step.

        A service reports the gradient norm only if clipping is enabled. So a `grad_clip_norm` of 0, which disables
        clipping, is sent as a norm that no gradient reaches.
        """
        fields = self.model_dump() | {"grad_clip_norm": self.grad_clip_norm or _NEVER_CLIPS}
        return types.AdamParams(learning_rate=learning_rate, **fields)


class KeepBestConfig(Config):
    """Metric that selects a run's best checkpoint."""

    metric: str = Field(
        title="Metric",
        description="Name of a metric that is measured at the steps of checkpoints. For `test/nll`, "
        "`checkpoint_every` must be a multiple of `eval_every`; for a metric of an infrequent evaluator, a multiple "
        "of `infrequent_eval_every`.",
        min_length=1,
        examples=["test/nll"],
    )
    mode: Literal["min", "max"] = Field(
        default="min", title="Mode", description="Whether smaller (`min`) or larger (`max`) values are better."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, fields: object) -> object:
        if isinstance(fields, str):
            # The loader puts "'keep_best' is VALUE, but " in front.
            raise ValueError(
                f"it has the fields metric and mode: write keep_best.metric={fields} on the command line, or "
                f"`keep_best: {{metric: {fields}, mode: min}}` in YAML"
            )
        return fields


class NamedConfig(Config):
    """Name of a run, under which its files are stored and a stopped run resumes."""

    run_name: str = Field(
        title="Run name",
        description="Name of the run and of its directory. Starting a training run or a sweep with the same name "
        "again resumes it; `evaluate` and `compare` measure again. `{start}` is replaced by the flow run's scheduled "
        "start time, which gives every flow run of a deployment its own name.",
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]|\{start\})*$",
        max_length=128,
    )

    @field_validator("run_name")
    @classmethod
    def _fill_in_start(cls, value: str) -> str:
        # The scheduled time is the same at every retry of a flow run, so that a crashed run finds its record again.
        return value.replace(START, f"{flow_run.scheduled_start_time:%Y%m%d-%H%M%S}") if START in value else value


class ServiceConfig(Config):
    """Model, service and storage settings."""

    model: str = Field(
        title="Model",
        description="Name of the base model on the service. The local engine takes `tiny`, `smollm2-135m`, a model "
        "directory or a name on the Hugging Face Hub.",
        min_length=1,
    )
    base_url: str = Field(
        default="",
        title="Tinker service",
        description="Tinker service: a URL, `block:NAME`, or `local` to start an engine for this run. Empty: "
        "TINKER_BASE_URL if set, the hosted service if TINKER_API_KEY is set, else `local`.",
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), title="Local engine", description="Settings of the engine that the run starts."
    )
    storage: str = Field(
        default="",
        title="Run storage",
        description="Location of the run records: a directory, s3://bucket/prefix or `block:NAME`. Empty: `runs` in "
        "the project's home directory.",
    )


class TrackedConfig(ServiceConfig):
    """Settings of a flow that logs to MLflow."""

    tracking: str = Field(
        default="",
        title="MLflow tracking",
        description="MLflow tracking URI or `block:NAME`. Empty: MLFLOW_TRACKING_URI if set, else a SQLite file in the "
        "project's home directory.",
    )
    experiment: str = Field(
        default="tinker-flows", title="Experiment", description="MLflow experiment of the run.", min_length=1
    )


class RunConfig(TrackedConfig, NamedConfig):
    """Run settings: tracking, checkpoints, resuming and promotion."""

    mlflow_tags: dict[str, str] = Field(
        default_factory=dict,
        title="MLflow tags",
        description="Extra tags of the MLflow run. `mlflow.parentRunId` nests the run below another one.",
    )
    register_prompts: bool = Field(
        default=False,
        title="Register prompts",
        description="At the start of the run, register the renderers and system prompts of the config in MLflow's "
        "prompt registry and link them to the MLflow run.",
    )
    resume: str = Field(
        default="auto",
        title="Resume",
        description="`auto` resumes from the last checkpoint of the same run name; `never` rejects a name in use. "
        "`RUN`, `RUN@STEP`, `RUN@best` or `RUN@final` forks another run in the same storage: the new run starts with "
        "the weights and optimizer state of that checkpoint and continues the data order and the schedules at its "
        "step. A `tinker://` path loads weights and optimizer state and starts at step 0. A stopped fork resumes from "
        "its own checkpoints. To start from given weights with a fresh optimizer, use `init_from`.",
        pattern=RESUME,
    )
    if_exists: Literal["resume", "delete", "ask"] = Field(
        default="resume",
        title="If the run exists",
        description="What happens if the run name is in use. `resume`: continue that run, according to the field "
        "`resume`. `delete`: at every start, delete the run's files and its MLflow run and start anew. `ask`: ask in "
        "the terminal. A run in progress is never deleted, and a flow run that Prefect restarts resumes its own run. "
        "If a name in use should be an error, set `resume` to `never`.",
    )
    accept_changes: tuple[ContentKind, ...] = Field(
        default=(),
        title="Accept changes",
        description="Kinds of content that may have changed since the last checkpoint when the run resumes: `data`, "
        "`terms`, `evaluators`, `environment` (with its rewards, hooks, completers and critic), `model` or `tokenizer` "
        "(with the renderer). Each accepted change is recorded. A change of any other kind is an error.",
    )
    init_from: str = Field(
        default=BASE,
        title="Initial weights",
        description="Weights from which step 0 starts, with a fresh optimizer, like tinker-cookbook's "
        f"`load_checkpoint_path`: {CHECKPOINT_HELP} A path may also name sampler weights, if the service can train "
        "them.",
        pattern=CHECKPOINT,
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        title="Restarts",
        description="Maximum number of restarts from the same checkpoint after the service was lost or the flow run "
        "crashed. A new checkpoint resets the count; 0 disables restarts.",
    )
    checkpoint_every: int = Field(
        default=10,
        ge=0,
        title="Checkpoint every",
        description="Steps between checkpoints. 0 disables this cadence. Several cadences can be set, and each of "
        "them saves checkpoints. The last step always saves a checkpoint.",
    )
    checkpoint_every_seconds: float = Field(
        default=0.0,
        ge=0,
        title="Checkpoint every (s)",
        description="Seconds between checkpoints. The time counts while the run is open, and the count survives "
        "restarts. 0 disables this cadence.",
    )
    checkpoint_every_tokens: int = Field(
        default=0,
        ge=0,
        title="Checkpoint every (tokens)",
        description="Tokens of the batches, prompts included, between checkpoints. 0 disables this cadence.",
    )
    checkpoint_kind: CheckpointKind = Field(
        default="state",
        title="Checkpoint kind",
        description="Content of periodic checkpoints. `state`: weights and optimizer state, from which a run can "
        "resume. `sampler`: weights to sample from. `both`: both of these. The final checkpoint always has both, and "
        "a run that stops early saves its state.",
    )
    keep_last: int | None = Field(
        default=None,
        ge=1,
        title="Keep the last",
        description="Number of recent checkpoints to keep on the service, in addition to the best and the final "
        "checkpoint. Older checkpoints are deleted. Unset: keep all.",
    )
    keep_best: KeepBestConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(KeepBestConfig),
        title="Keep the best",
        description="Metric that selects the best checkpoint, which is then kept. Unset: no best checkpoint.",
    )
    ttl_seconds: int | None = Field(
        default=None,
        ge=3600,
        le=315_360_000,
        title="Time to live (s)",
        description="Seconds after which the service deletes a checkpoint; the best and the final checkpoint never "
        "expire. A run that is paused for longer than this has no checkpoint of its own to resume from. Unset: "
        "checkpoints never expire.",
    )
    register_as: str | None = Field(
        default=None,
        min_length=1,
        title="Register as",
        description="Name of a registered model in MLflow. A finished run adds its best checkpoint (without "
        "`keep_best`, its final checkpoint) as a new version.",
    )
    promote_if: str | None = Field(
        default=None,
        title="Promote if",
        description="Condition for registering the checkpoint, such as `test/nll < 0.98 * baseline`: an evaluation "
        "metric, one of < <= > >=, and a number or `[NUMBER *] baseline`. The baseline is the same metric in the "
        "run's first evaluation, before training.",
        examples=["test/nll < 0.98 * baseline"],
    )
    promote_confidence: float | None = Field(
        default=None,
        ge=0.5,
        le=0.999,
        title="Promote with confidence",
        description="Confidence with which the checkpoint must be better than the baseline on the same problems. At "
        "0.95, the probability that a run registers a checkpoint is at most 5 % if all of its checkpoints are only as "
        "good as the baseline. With `keep_best`, the p-value is multiplied by the number of checkpoints that it "
        "compares. Only for `test/nll`, `test/nll_per_token`, `test/bits_per_byte`, `test/env/all/reward/total`, "
        "`test/teacher_kl`, `test/accuracy` and `test/margin` of preferences, and the metrics of evaluators that grade "
        "answers. Unset: compare the two values and ignore their uncertainty.",
    )

    needs_approval: bool = Field(
        default=False,
        title="Needs approval",
        description="Ask a person before the checkpoint is registered, once `promote_if` holds. A run of a deployment "
        "is suspended until someone submits the form in the Prefect UI; a run from a terminal asks in the terminal.",
    )

    @property
    def has_cadence(self) -> bool:
        """Return whether the run saves periodic checkpoints."""
        return any((self.checkpoint_every, self.checkpoint_every_seconds, self.checkpoint_every_tokens))

    @model_validator(mode="after")
    def _check_keep_best(self) -> Self:
        if self.keep_best and not self.has_cadence:
            raise ValueError(
                "keep_best chooses among periodic checkpoints, but checkpoint_every is 0: set it, "
                "checkpoint_every_seconds or checkpoint_every_tokens above 0"
            )
        if self.keep_best and self.checkpoint_kind == "sampler":
            raise ValueError(
                "keep_best keeps checkpoints with their state, but checkpoint_kind is 'sampler': set it to 'both' or "
                "'state'"
            )
        return self

    @field_validator("register_as")
    @classmethod
    def _check_register_as(cls, value: str | None) -> str | None:
        return check_model_name(value)

    @field_validator("promote_if")
    @classmethod
    def _check_promote_if(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("register_as"):
            raise ValueError("it needs register_as: set the name of the registered model")
        return check_promote_if(value)

    @model_validator(mode="after")
    def _check_confidence(self) -> Self:
        check_confidence(self.promote_if, self.promote_confidence)
        return self

    @field_validator("needs_approval")
    @classmethod
    def _check_needs_approval(cls, value: bool, info: ValidationInfo) -> bool:
        return check_approval(value, info.data.get("register_as"))

    @field_validator("init_from")
    @classmethod
    def _check_init_from(cls, value: str, info: ValidationInfo) -> str:
        resume = info.data.get("resume", "auto")
        if value != BASE and resume not in ("auto", "never"):
            raise ValueError(
                f"init_from and resume={resume} both name the weights to start from: remove resume for a fresh "
                "optimizer, or init_from to continue the optimizer"
            )
        return value

    @field_validator("resume", mode="before")
    @classmethod
    def _check_resume(cls, value: object) -> object:
        if isinstance(value, str) and not re.fullmatch(RESUME, value):
            raise ValueError("use auto, never, the name of a run, RUN@STEP, RUN@best, RUN@final or a tinker:// path")
        return value


class WeightsConfig(ServiceConfig):
    """Settings of a flow that loads weights by name."""

    model: str = Field(
        default="",
        title="Model",
        description="Name of the base model on the service. Empty: the model of the run whose checkpoint is named.",
    )

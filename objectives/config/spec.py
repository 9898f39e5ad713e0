"""Specs of objectives as plain data, for YAML, JSON and Prefect parameter forms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from objectives.config.json_schema import OFF, choose_base_loss, choose_term, optional_group
from objectives.estimators import EstimatorChoice
from objectives.term import Execution, OnError
from objectives.term_weights.schedule import Weight
from objectives.term_weights.targets import TargetSpec, check_weight, unset_weight

Backend = Literal["auto", "client", "server"]


def _reject_clusters(execution: object) -> object:
    """Reject the executions `dask` and `ray` of release 0.1; the error says what replaces them."""
    if execution in ("dask", "ray"):
        raise ValueError(
            f"a cluster is now a setting of the run: set task_runner.kind to {execution!r}, remove this execution, and "
            "set execution to 'thread' for terms that stay in the run's process"
        )
    return execution


class RegularizerSpec(BaseModel):
    """Weighted term of an objective."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=choose_term)

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]+$",
        title="Name",
        description="Unique name within the objective; prefix of the term's metrics, `term/<name>/...`.",
    )
    fn: str | None = Field(
        default=None,
        title="Term",
        description="Term to use: a registered name or an import path, `package.module:name`. Unset: the registered "
        "term called `name`.",
    )
    weight: Weight | None = Field(
        default=1.0,
        title="Weight",
        description="Factor of the term in the total loss, a number or a schedule of at least 0. Monitors ignore it, "
        "and a term with a target has none.",
    )
    target: TargetSpec | None = Field(
        default=None,
        json_schema_extra=optional_group(TargetSpec),
        title="Target",
        description="Limit of the term's mean value, such as `{at_most: 0.05}`. A controller finds the weight that "
        "meets it.",
    )
    params: dict[str, object] = Field(
        default_factory=dict, title="Parameters", description="Keyword arguments of the term and of its estimator."
    )
    estimator: EstimatorChoice = Field(
        default="auto",
        title="Estimator",
        description="Estimator that turns the scores of a scored term into a gradient. `auto` chooses by the data: "
        "`score_function` for samples of the model, `minimum_risk` for fixed data with several completions per "
        "prompt, and the term's own estimator for flagged tokens. Terms that are not scored accept only `auto`.",
    )
    enabled: bool = Field(default=True, title="Enabled", description="Evaluate the term.")
    every: int = Field(
        default=1, ge=1, title="Every", description="Evaluate at steps that are divisible by this number."
    )
    retries: int = Field(
        default=0,
        ge=0,
        title="Retries",
        description="Number of retries if preparing or evaluating the term fails.",
    )
    on_error: OnError = Field(
        default="raise",
        title="On error",
        description="What happens if the term fails. `raise`: the run ends. `skip`: the step continues without the "
        "term. `last`: the step continues without the term's gradient, and the charts repeat the term's last value.",
    )
    execution: Annotated[Execution, BeforeValidator(_reject_clusters)] = Field(
        default="task_runner",
        title="Execution",
        description="Where the term runs. `task_runner`: on the task runner of the run, by default a thread. "
        "`thread`: on a thread of the run's process. `inline`: on the thread of the flow, after the other terms have "
        "started. `async`: on an event loop. `process`: in a separate process, which is killed at `timeout_s`.",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        title="Timeout (s)",
        description="Time limit for preparing or evaluating one batch, in seconds. A term that exceeds it has failed. "
        "The execution `inline` has no time limit.",
    )

    _unset_weight = model_validator(mode="before")(unset_weight)
    _check_weight = model_validator(mode="after")(check_weight)


class BaseLossSpec(BaseModel):
    """Base loss with parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(title="Name", description="Name of the loss, such as `ppo`.")
    params: dict[str, object] = Field(
        default_factory=dict,
        title="Parameters",
        description="Parameters of the loss, as in the SDK's `loss_fn_config`, or of the term.",
    )


class WeightingSpec(BaseModel):
    """Balancing by a rule of TorchJD without parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["upgrad", "dualproj", "mgda", "imtl_g", "pcgrad", "random"] = Field(
        title="Method", description="The balancing rule."
    )


PCGradSpec = WeightingSpec
"""Name of release 0.1, when `pcgrad` was the only method."""


class AlignedMTLSpec(BaseModel):
    """Balancing by aligned principal components of the gradients (Senushkin et al. 2023)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["aligned_mtl"] = Field(title="Method", description="The balancing rule.")
    scale: Literal["min", "median", "rmse"] = Field(
        default="min",
        title="Scale",
        description="Common length that the principal components get: the shortest length, the median length, or the "
        "root mean square of the lengths.",
    )


class CAGradSpec(BaseModel):
    """Balancing in favor of the term that improves least, near the sum of the gradients (Liu et al. 2021)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["cagrad"] = Field(title="Method", description="The balancing rule.")
    c: float = Field(
        default=0.5,
        ge=0,
        title="c",
        description="Largest distance from the sum of the gradients, relative to its norm; 0 changes nothing.",
    )


class GradNormSpec(BaseModel):
    """Balancing by learned weights that give gradients comparable norms (Chen et al. 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["gradnorm"] = Field(title="Method", description="The balancing rule.")
    alpha: float = Field(
        default=1.5,
        ge=0,
        title="Alpha",
        description="Strength of the preference for terms with slower progress; 0 gives all gradients the same norm.",
    )
    learning_rate: float = Field(
        default=0.025, gt=0, title="Learning rate", description="Learning rate of the factors."
    )


BalanceSpec = Annotated[WeightingSpec | AlignedMTLSpec | CAGradSpec | GradNormSpec, Field(discriminator="method")]


class WatchSpec(BaseModel):
    """Thresholds and durations of warnings about terms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dominance_above: float = Field(
        default=0.8,
        gt=0,
        le=1,
        title="Dominance above",
        description="Gradient share of one term above which the run warns.",
    )
    conflict_below: float = Field(
        default=0.0,
        ge=-1,
        le=0,
        title="Conflict below",
        description="Cosine of two gradients below which the run warns.",
    )
    idle_below: float = Field(
        default=1e-3,
        ge=0,
        lt=1,
        title="Idle below",
        description="The run warns if the gradient share of a term with one score per completion is below this value: "
        "the term then has almost no effect.",
    )
    patience: int = Field(
        default=20,
        ge=1,
        title="Patience (evaluations)",
        description="Number of consecutive evaluations of a term after which a condition causes a warning.",
    )
    share_decay: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        title="Decay of shares",
        description="Decay of the moving averages of gradient shares and of the metrics of preference losses, per "
        "evaluation.",
    )
    effect_every: int = Field(
        default=10,
        ge=0,
        title="Effect every",
        description="Steps between measurements of how an update changed the value of each term "
        "(`term/<name>/effect`). A measurement costs one forward pass. 0 disables them.",
    )


def _read_off(value: object) -> object:
    """Return None for the word `off`, and for False, because YAML reads an unquoted `off` as False."""
    return None if value == OFF or value is False else value


class ObjectiveSpec(BaseModel):
    """Base loss and the terms added to it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=choose_base_loss)

    base_loss: str | BaseLossSpec = Field(
        default="cross_entropy",
        title="Base loss",
        description="Loss to which the terms are added: the name of the loss, or its name and parameters.",
    )
    regularizers: tuple[RegularizerSpec, ...] = Field(default=(), title="Regularizers", description="Weighted terms.")
    balance: Annotated[BalanceSpec | None, BeforeValidator(_read_off)] = Field(
        default=None,
        title="Balance",
        description="Rule that adapts the weights at each step: a mapping whose `method` is `upgrad`, `dualproj`, "
        "`cagrad`, `mgda`, `imtl_g`, `aligned_mtl`, `pcgrad`, `random` or `gradnorm`. Unset or `off`: no balancing.",
    )
    watch: WatchSpec = Field(default=WatchSpec(), title="Watch", description="Thresholds of the warnings about terms.")
    backend: Backend = Field(
        default="auto",
        title="Backend",
        description="Where the objective is computed. `server`: on the service, in one pass per step. `client`: on "
        "the client, between the two passes of a step. `auto`: on the service if the base loss and every term that is "
        "not a monitor can be traced, or if the service has the base loss by name and all terms are monitors; else on "
        "the client.",
    )

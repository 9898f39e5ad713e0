"""An objective as plain data: what YAML, JSON and a Prefect parameter form can hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from objectives.form import choose_base_loss, choose_term
from objectives.schedule import Weight

Execution = Literal["inline", "async", "thread", "process", "dask", "ray"]
OnError = Literal["raise", "skip", "last"]
Backend = Literal["auto", "client", "server"]


class RegularizerSpec(BaseModel):
    """One weighted term of an objective."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=choose_term)

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]+$",
        title="Name",
        description="Unique in its objective; names the term's metrics, `term/<name>/...`.",
    )
    fn: str | None = Field(
        default=None,
        title="Term",
        description="The term to use: a registered name or an import path, `package.module:name`; by default the "
        "registered one of this name.",
    )
    weight: Weight = Field(
        default=1.0,
        title="Weight",
        description="Factor of the term in the total loss, at least 0: a number or a schedule; monitors have none.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, title="Parameters", description="Keyword parameters of the term."
    )
    enabled: bool = Field(default=True, title="Enabled", description="Whether the term takes part at all.")
    every: int = Field(default=1, ge=1, title="Every", description="The term is evaluated at steps divisible by this.")
    retries: int = Field(default=0, ge=0, title="Retries", description="How often a failed evaluation is tried again.")
    on_error: OnError = Field(
        default="raise",
        title="On error",
        description="`raise` ends the run when the term fails; `skip` goes on without it for that step; `last` "
        "too, and shows its last value again.",
    )
    execution: Execution = Field(
        default="thread",
        title="Execution",
        description="Where the term runs: `inline` after the others, `thread` beside them, `async` on an event loop, "
        "`process` in a process of its own, `dask` and `ray` on a worker of a cluster.",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        title="Timeout (s)",
        description="Longest time for preparing or evaluating one batch, in seconds; longer is a failure.",
    )


class BaseLossSpec(BaseModel):
    """A base loss with parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(title="Name", description="Name of the loss, such as `ppo`.")
    params: dict[str, float] = Field(
        default_factory=dict, title="Parameters", description="Its parameters, as in `loss_fn_config`."
    )


class PCGradSpec(BaseModel):
    """Conflicting gradients are projected (Yu et al. 2020)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["pcgrad"] = Field(title="Method", description="The balancing rule.")


class GradNormSpec(BaseModel):
    """Weights are learned so that gradients have comparable norms (Chen et al. 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["gradnorm"] = Field(title="Method", description="The balancing rule.")
    alpha: float = Field(
        default=1.5,
        ge=0,
        title="Alpha",
        description="How much more a term pulls that has learned less; 0 makes all norms the same.",
    )
    learning_rate: float = Field(default=0.025, gt=0, title="Learning rate", description="Of the weights' factors.")


BalanceSpec = Annotated[PCGradSpec | GradNormSpec, Field(discriminator="method")]


class WatchSpec(BaseModel):
    """What is warned of, and after how long."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dominance_above: float = Field(
        default=0.8, gt=0, le=1, title="Dominance above", description="Share of the gradient of one term."
    )
    conflict_below: float = Field(
        default=0.0, ge=-1, le=0, title="Conflict below", description="Cosine of two gradients."
    )
    patience: int = Field(
        default=20, ge=1, title="Patience (steps)", description="Steps on end that it lasts before it is warned of."
    )
    share_decay: float = Field(
        default=0.9, ge=0, lt=1, title="Decay of shares", description="Of the moving average of shares, per step."
    )


class ObjectiveSpec(BaseModel):
    """A base loss and the terms added to it."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=choose_base_loss)

    base_loss: str | BaseLossSpec = Field(
        default="cross_entropy",
        title="Base loss",
        description="The loss that the terms are added to: its name, or name and params.",
    )
    regularizers: tuple[RegularizerSpec, ...] = Field(
        default=(), title="Regularizers", description="The weighted terms."
    )
    balance: BalanceSpec | None = Field(
        default=None, title="Balance", description="Changes the weights at each step by a known rule; none by default."
    )
    watch: WatchSpec = Field(
        default=WatchSpec(), title="Watch", description="Warnings of terms that dominate or conflict."
    )
    backend: Backend = Field(
        default="auto",
        title="Backend",
        description="`server`: the service runs the whole objective, one pass for each step; `client`: two passes, the "
        "terms evaluated here between them; `auto`: one pass where the base loss and every term can be traced.",
    )

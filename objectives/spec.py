"""An objective as plain data: what YAML, JSON and a Prefect parameter form can hold."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from objectives.schedule import Weight

Execution = Literal["inline", "async", "thread", "process"]
OnError = Literal["raise", "skip", "last"]


class RegularizerSpec(BaseModel):
    """One weighted term of an objective."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Unique in its objective; names the term's metrics, `term/<name>/...`.",
    )
    fn: str | None = Field(
        default=None,
        description="The term to use: a registered name or an import path, `package.module:name`; by default the "
        "registered one of this name.",
    )
    weight: Weight = Field(
        default=1.0,
        description="Factor of the term in the total loss, at least 0: a number or a schedule; monitors have none.",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword parameters of the term.")
    enabled: bool = Field(default=True, description="Whether the term takes part at all.")
    every: int = Field(default=1, ge=1, description="The term is evaluated at steps divisible by this.")
    retries: int = Field(default=0, ge=0, description="How often a failed evaluation is tried again.")
    on_error: OnError = Field(
        default="raise",
        description="`raise` ends the run when the term fails; `skip` goes on without it for that step; `last` "
        "too, and shows its last value again.",
    )
    execution: Execution = Field(
        default="thread",
        description="Where the term runs: `inline` after the others, `thread` beside them, `async` on an event loop, "
        "`process` in a process of its own.",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest time for preparing or evaluating one batch, in seconds; longer is a failure.",
    )


class BaseLossSpec(BaseModel):
    """A base loss with parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the loss, such as `ppo`.")
    params: dict[str, float] = Field(default_factory=dict, description="Its parameters, as in `loss_fn_config`.")


class ObjectiveSpec(BaseModel):
    """A base loss and the terms added to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_loss: str | BaseLossSpec = Field(
        default="cross_entropy", description="The loss that the terms are added to: its name, or name and params."
    )
    regularizers: tuple[RegularizerSpec, ...] = Field(default=(), description="The weighted terms.")


def explain(error: ValidationError) -> str:
    """The first thing a validation found wrong, as a clause: where, what was got, what was expected."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part != "number") or "it"  # "number": a plain weight
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in ("extra_forbidden", "missing"):
        return f"{where!r}: {message}"
    return f"{where!r} is {first['input']!r}, but {message}"

"""Schedules of a term's weight over a run: constant, linear, cosine, warmup."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Schedule(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Constant(_Schedule):
    """Constant weight."""

    schedule: Literal["constant"] = Field(default="constant", description="The shape of the schedule.")
    value: NonNegative = Field(description="The weight of every step.")

    def weight_at(self, step: int, num_steps: int) -> float:
        """The weight of a step.

        >>> Constant(value=0.1).weight_at(step=7, num_steps=10)
        0.1
        """
        return self.value


class Linear(_Schedule):
    """Linear change from ``start`` at the first step to ``end`` at the last."""

    schedule: Literal["linear"] = Field(default="linear", description="The shape of the schedule.")
    start: NonNegative = Field(description="The weight of the first step.")
    end: NonNegative = Field(description="The weight of the last step.")

    def weight_at(self, step: int, num_steps: int) -> float:
        """The weight of a step.

        >>> [Linear(start=0, end=1).weight_at(step, num_steps=5) for step in range(5)]
        [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        progress = _progress(step, num_steps)
        return self.start * (1 - progress) + self.end * progress


class Cosine(_Schedule):
    """Cosine change from ``start`` to ``end``: ``end + (start - end) (1 + cos(pi progress)) / 2``.

    The shape is from Loshchilov & Hutter 2017, "SGDR" (arXiv:1608.03983), without restarts.
    """

    schedule: Literal["cosine"] = Field(default="cosine", description="The shape of the schedule.")
    start: NonNegative = Field(description="The weight of the first step.")
    end: NonNegative = Field(description="The weight of the last step.")

    def weight_at(self, step: int, num_steps: int) -> float:
        """The weight of a step.

        >>> [round(Cosine(start=1, end=0).weight_at(step, num_steps=5), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
        """
        progress = (1 - math.cos(math.pi * _progress(step, num_steps))) / 2
        return self.start * (1 - progress) + self.end * progress


class Warmup(_Schedule):
    """Linear warmup to ``value`` in ``steps`` equal increments, starting above zero; then constant."""

    schedule: Literal["warmup"] = Field(default="warmup", description="The shape of the schedule.")
    value: NonNegative = Field(description="The weight after the warmup.")
    steps: int = Field(ge=1, description="Number of steps of the warmup.")

    def weight_at(self, step: int, num_steps: int) -> float:
        """The weight of a step.

        >>> [Warmup(value=1, steps=4).weight_at(step, num_steps=10) for step in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        """
        return self.value * min(1.0, (step + 1) / self.steps)


def _progress(step: int, num_steps: int) -> float:
    """Progress from 0 at the first step to 1 at the last."""
    return min(1.0, step / max(1, num_steps - 1))


def _tag(value: object) -> str | None:
    if isinstance(value, dict):
        return value.get("schedule")
    if isinstance(value, bool):
        return None
    return getattr(value, "schedule", "number")


WeightSchedule = Constant | Linear | Cosine | Warmup

# Tagged, so that the error for an invalid schedule is about its fields and not about the other union members.
Weight = Annotated[
    Annotated[NonNegative, Tag("number")]
    | Annotated[Constant, Tag("constant")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[Warmup, Tag("warmup")],
    Discriminator(
        _tag,
        custom_error_type="weight",
        custom_error_message="use a number, or fields whose schedule is constant, linear, cosine or warmup; a target "
        "is a field of the term, next to its name",
    ),
]

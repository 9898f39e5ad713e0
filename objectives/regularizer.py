"""A term with its place in an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from objectives.schedule import WeightSchedule
from objectives.spec import Execution, OnError
from objectives.term import Term

# The base loss has this row in every table of terms.
BASE = "base"


@dataclass(frozen=True, slots=True)
class Regularizer:
    """A term with its place in an objective: `RegularizerSpec`, looked up and checked."""

    name: str
    term: Term
    schedule: WeightSchedule
    params: Mapping[str, Any]
    every: int = 1
    retries: int = 0
    on_error: OnError = "raise"
    execution: Execution = "thread"
    timeout_s: float | None = None

    def weight_at(self, step: int, num_steps: int) -> float:
        """The term's factor in the total loss of a step; 0 for a monitor, which is no part of it."""
        return 0.0 if self.term.kind == "monitor" else self.schedule.weight_at(step, num_steps)

    def due_at(self, step: int) -> bool:
        return step % self.every == 0

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

    @property
    def adds_up(self) -> bool:
        """Whether its value of a batch is the sum of its values of the batch's parts."""
        return self.term.reduction == "sum" or getattr(self.term.evaluate, "adds_up", False)

    def weight_at(self, step: int, num_steps: int, share: float = 1.0) -> float:
        """The term's factor in the total loss of a step; 0 for a monitor, which is no part of it.

        Args:
            share: of the batch in its update: one over the number of minibatches, so that the means of a term over each
                of them come to its mean over all.
        """
        if self.term.kind == "monitor":
            return 0.0
        return (1.0 if self.adds_up else share) * self.schedule.weight_at(step, num_steps)

    def due_at(self, step: int) -> bool:
        return step % self.every == 0

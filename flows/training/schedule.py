"""Schedule of a run: learning rates, evaluations and checkpoints by step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from flows.config.train import TrainConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of a run.

    Attributes:
        first: First step of the run; for a fork, the step of its parent's checkpoint.
    """

    config: TrainConfig
    steps_per_epoch: int
    first: int = 0

    @property
    def num_steps(self) -> int:
        return min(self.config.num_epochs * self.steps_per_epoch, self.config.num_steps or sys.maxsize)

    def learning_rate_at(self, step: int) -> float:
        return self.config.learning_rate * compute_schedule_lr_multiplier(self.config.lr_schedule, step, self.num_steps)

    def segments(self, first: int) -> Iterator[range]:
        """Yield the ranges of remaining steps between checkpoints."""
        cuts = [step for step in range(first + 1, self.num_steps + 1) if self.saves_before(step)]
        return (range(start, stop) for start, stop in pairwise([first, *cuts]))

    def saves_before(self, step: int) -> bool:
        return step == self.num_steps or _is_due(step, self.config.checkpoint_every)

    def evaluates_before(self, step: int) -> bool:
        # A fork with promote_if evaluates its first weights, which are the baseline.
        is_baseline = step == self.first and self.config.promote_if is not None
        is_due = _is_due(step, self.config.eval_every) or step == self.num_steps or is_baseline
        return self.config.eval_every > 0 and is_due


def _is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`, including step 0; 0 means never."""
    return every > 0 and step % every == 0

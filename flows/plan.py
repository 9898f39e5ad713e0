"""What is due at which step of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from flows.train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a config over data of so many steps per epoch.

    Attributes:
        first: the step that the run began at, which is its parent's for a fork.
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
        """The steps that are left, cut at the checkpoints."""
        cuts = [step for step in range(first + 1, self.num_steps + 1) if self.saves_before(step)]
        return (range(start, stop) for start, stop in pairwise([first, *cuts]))

    def saves_before(self, step: int) -> bool:
        return step == self.num_steps or _is_due(step, self.config.checkpoint_every)

    def evaluates_before(self, step: int) -> bool:
        # Of a fork, the baseline that promote_if compares with.
        is_baseline = step == self.first and self.config.promote_if is not None
        is_due = _is_due(step, self.config.eval_every) or step == self.num_steps or is_baseline
        return self.config.eval_every > 0 and is_due


def _is_due(step: int, every: int) -> bool:
    """True at every `every`-th step, the first one included; 0 is never."""
    return every > 0 and step % every == 0

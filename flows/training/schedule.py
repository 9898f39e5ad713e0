"""Schedule of a run: learning rates, evaluations and checkpoints by step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from flows.config.train import TrainConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate, evaluations and checkpoints of a run by step.

    Attributes:
        first: First step of the run; for a fork, the step of its parent's checkpoint.
    """

    config: TrainConfig
    steps_per_epoch: int
    first: int = 0

    @property
    def num_steps(self) -> int:
        return min(self.config.num_epochs * self.steps_per_epoch, self.config.num_steps or sys.maxsize)

    @property
    def steps(self) -> range:
        """Steps that the run trains."""
        return range(self.first, self.num_steps)

    def learning_rate_at(self, step: int) -> float:
        return self.config.learning_rate * compute_schedule_lr_multiplier(self.config.lr_schedule, step, self.num_steps)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the learning rate of a step, its epoch, and the fraction of the run that is done after it."""
        return {
            "optim/lr": self.learning_rate_at(step),
            "progress/epoch": step // self.steps_per_epoch,
            "progress/done_frac": (step + 1) / self.num_steps,
        }

    def segments(self, start: int) -> Iterator[range]:
        """Yield the ranges of steps from `start` to the end, cut at the checkpoints of `checkpoint_every`."""
        cuts = [step for step in self.saves() if step > start]
        return (range(begin, end) for begin, end in pairwise([start, *cuts]))

    def evaluates_before(self, step: int) -> bool:
        return self.evaluates_often_before(step) or self.evaluates_rarely_before(step)

    def evaluates_often_before(self, step: int) -> bool:
        """Return whether the held-out data and `evaluators` are due before a step."""
        return self._is_evaluation(step, self.config.eval_every)

    def evaluates_rarely_before(self, step: int) -> bool:
        """Return whether `infrequent_evaluators` are due before a step."""
        return self.evaluates_rarely and self._is_evaluation(step, self.config.infrequent_eval_every)

    def evaluations(self) -> dict[int, tuple[bool, bool]]:
        """Return the steps before which an evaluation is due, with the kinds that are due.

        The first value of a step is True if the held-out data and `evaluators` are due, the second one if
        `infrequent_evaluators` are. The final weights are evaluated before the step `num_steps`.
        """
        steps = range(self.first, self.num_steps + 1)
        kinds = {step: (self.evaluates_often_before(step), self.evaluates_rarely_before(step)) for step in steps}
        return {step: kind for step, kind in kinds.items() if any(kind)}

    def saves(self) -> list[int]:
        """Return the steps before which `checkpoint_every` makes a checkpoint due, and `num_steps` for the last one."""
        every = self.config.checkpoint_every
        return [step for step in range(1, self.num_steps + 1) if step == self.num_steps or _is_due(step, every)]

    @property
    def evaluates_rarely(self) -> bool:
        return bool(self.config.infrequent_evaluators) and self.config.infrequent_eval_every > 0

    @property
    def num_often(self) -> int:
        """Number of evaluations of the held-out data and `evaluators` in a whole run."""
        return sum(often for often, _ in self.evaluations().values())

    @property
    def num_rarely(self) -> int:
        """Number of evaluations of `infrequent_evaluators` in a whole run."""
        return sum(rarely for _, rarely in self.evaluations().values())

    def _is_evaluation(self, step: int, every: int) -> bool:
        # A fork with promote_if evaluates its first weights, which are the baseline.
        is_baseline = step == self.first and self.config.promote_if is not None
        return every > 0 and (_is_due(step, every) or step == self.num_steps or is_baseline)


class CheckpointCadence:
    """Cadence of periodic checkpoints in steps, seconds and tokens of the batches, prompts included.

    Checkpoints are due at multiples of `checkpoint_every`. Seconds and tokens are counted from the last checkpoint.

    Attributes:
        num_tokens: Tokens of the batches of all steps so far, which checkpoints record as `elapsed_tokens`, the name
            in tinker-cookbook.
    """

    def __init__(self, config: TrainConfig, record: Mapping[str, Any]) -> None:
        """Continue from the record of the checkpoint that the run starts from; empty for a new run."""
        self._config = config
        self.num_tokens = self._saved_tokens = int(record.get("elapsed_tokens", 0))
        self._saved_hours = float(record.get("spent", {}).get("hours", 0.0))

    def is_due(self, step: int, hours: float) -> bool:
        """Return whether a checkpoint is due before a step, when the run has been open for `hours`."""
        config = self._config
        seconds, tokens = config.checkpoint_every_seconds, config.checkpoint_every_tokens
        return (
            _is_due(step, config.checkpoint_every)
            or 0 < seconds <= (hours - self._saved_hours) * 3600
            or 0 < tokens <= self.num_tokens - self._saved_tokens
        )

    def count_from_here(self, hours: float) -> None:
        """Count seconds and tokens from now on, because a checkpoint is requested now."""
        self._saved_tokens, self._saved_hours = self.num_tokens, hours


def _is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`, including step 0; 0 means never."""
    return every > 0 and step % every == 0

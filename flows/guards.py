"""Guards: what becomes of a step whose loss is not finite, or far above those before it.

Each step is looked at once, before its update where a config says `skip`, and else when the service has answered. What
a guard decides is a line of guards.jsonl before the run goes on, so that every later part of it passes over the same
steps: they take no part in the run, and leave no trace in its objective.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from prefect.logging import get_run_logger
from pydantic import Field

from blocks.errors import GuardError, NotFiniteError, PoisonedError, RolledBackError
from blocks.storage import RunDirectory
from flows.config import Config
from flows.ended import note_end
from objectives import errors
from objectives.linearize import Linearized
from objectives.objective import Objective
from tasks.metrics import MetricsLog

GUARDS_NAME = "guards.jsonl"

Policy = Literal["stop", "skip", "rollback"]

logger = logging.getLogger(__name__)


class GuardConfig(Config):
    """What becomes of a bad step: `stop` ends the run, `skip` leaves out its update, `rollback` goes on from the last
    checkpoint without it."""

    not_finite: Policy = Field(
        default="stop",
        title="Not finite",
        description="Where a loss, gradient or answer of the service is NaN or infinite. `skip` looks at a forward "
        "pass before each update, which a cross-entropy alone does without.",
    )
    spike: Literal["off", "stop", "skip", "rollback"] = Field(
        default="off", title="Spike", description="Where the loss is far above that of the steps before; skip as above."
    )
    spike_threshold: float = Field(
        default=6.0,
        gt=0,
        title="Spike threshold",
        description="How far above their median, in robust standard deviations (see guard/spike_score).",
    )
    spike_window: int = Field(
        default=20, ge=4, title="Spike window", description="How many steps before; the first ones are not judged."
    )
    max_in_a_row: int = Field(
        default=3, ge=1, title="In a row", description="A run that would pass over more steps on end than that stops."
    )

    @property
    def looks_first(self) -> bool:
        """Whether a step's loss has to be known before its update is sent."""
        return "skip" in (self.not_finite, self.spike)


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step that the run passes over.

    Attributes:
        step: which one.
        kind: what was wrong.
        policy: what was done about it.
        loss: its loss; None where that is not finite.
        why: one sentence for the user.
    """

    step: int
    kind: Literal["not_finite", "spike"]
    policy: Policy
    loss: float | None
    why: str


class Guard:
    """The guards of an open run.

    Attributes:
        passed_over: the steps that take no part in the run.
    """

    def __init__(self, config: GuardConfig, directory: RunDirectory, log: MetricsLog, objective: Objective) -> None:
        self._config, self._directory, self._log, self._objective = config, directory, log, objective
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._last_good: int | None = None
        self.passed_over: dict[int, BadStep] = {each.step: each for each in _read(directory)}

    def look(self, step: int, compute: Callable[[], Linearized]) -> Linearized | None:
        """The linearized objective of a step that is fit to be trained on; None for one that is skipped.

        Raises:
            GuardError: it is not fit, and the run ends.
            RolledBackError: it is not fit, and the run goes on from its last checkpoint.
        """
        before = self._objective.state() if self._config.looks_first else {}
        try:
            linearized = compute()
            metrics = self._judge(linearized.metrics["loss/total"])
        except (errors.NotFiniteError, NotFiniteError) as error:
            self._treat(
                self._blamed(step, error), "not_finite", None, str(error), sent=isinstance(error, PoisonedError)
            )
        except _Spike as spike:
            self._treat(step, "spike", spike.loss, str(spike))
        else:
            self._last_good = step
            return replace(linearized, metrics={**linearized.metrics, **metrics})
        self._objective.restore(before)
        return None

    @contextmanager
    def answers(self, step: int) -> Iterator[None]:
        """Treat what is not finite in the service's answers about the weights before a step, or about its update.

        Raises:
            GuardError, RolledBackError: as `look` does; what was sent cannot be skipped, and is rolled back.
        """
        try:
            yield
        except NotFiniteError as error:
            self._treat(self._blamed(step, error), "not_finite", None, str(error), sent=True)

    def check_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Treat what is not finite in the service's own metrics of an update, such as a gradient's norm."""
        with self.answers(step):
            for key, value in metrics.items():
                if not math.isfinite(value):
                    raise NotFiniteError(f"The service's metric {key} of step {step} is {value}: look at its data.")

    def metrics(self, step: int) -> dict[str, float]:
        """What there is to log of the guards at a step, whether it is passed over or not."""
        metrics = {"guard/num_passed_over": float(sum(each <= step for each in self.passed_over))}
        if bad := self.passed_over.get(step):
            metrics |= {"guard/passed_over": 1.0} | ({"guard/bad_loss": bad.loss} if bad.loss is not None else {})
        return metrics

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with, as plain data."""
        return {"losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; an empty one is the beginning."""
        self._losses.extend(state.get("losses", ()))

    def _judge(self, loss: float) -> dict[str, float]:
        """Add a loss to those that others are compared with, unless it is a spike."""
        config, score = self._config, None
        if not math.isfinite(loss):
            raise NotFiniteError(f"The loss is {loss}: look at the data of this step.")
        if config.spike != "off" and len(self._losses) == config.spike_window:
            score = spike_score(loss, self._losses)
            if score > config.spike_threshold:
                raise _Spike(loss, score)
        self._losses.append(loss)
        return {} if score is None else {"guard/spike_score": score}

    def _blamed(self, step: int, error: Exception) -> int:
        """Weights that are broken were so by the update just before, which nothing has looked at since."""
        return step - 1 if isinstance(error, PoisonedError) and self._last_good == step - 1 else step

    def _treat(
        self, step: int, kind: Literal["not_finite", "spike"], loss: float | None, why: str, *, sent: bool = False
    ) -> None:
        """Do what the config says about a bad step; returns where it is skipped."""
        said = self._config.not_finite if kind == "not_finite" else self._config.spike
        policy: Policy = "stop" if said in ("off", "stop") else "rollback" if sent else said
        num_before = next(n for n in range(step + 1) if step - 1 - n not in self.passed_over)
        if policy == "stop" or step in self.passed_over or num_before >= self._config.max_in_a_row:
            after = f", after {num_before} steps on end that were passed over" if num_before else ""
            sentence = (
                f"The run stopped at step {step}{after}: {why} No checkpoint holds it, so that the same command goes "
                f"on from the last one; guards.{kind} says what else may be done."
            )
            note_end(self._log, sentence)
            raise GuardError(sentence)
        bad = BadStep(step, kind, policy, loss, why)
        self._directory.append_line(GUARDS_NAME, json.dumps(asdict(bad)))
        self.passed_over[step] = bad
        get_run_logger().warning("Step %d is passed over (%s). %s", step, policy, why)
        self._log.tag(f"tinker_flows.guard.{step}", f"{policy}: {why}")
        if policy == "rollback":
            raise RolledBackError(f"Step {step} is passed over. {why}")


def spike_score(loss: float, losses: Sequence[float]) -> float:
    """How far a loss is above the median of those before it, in robust standard deviations.

    The modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): 0.6745 (x - median) / MAD,
    where MAD is the median absolute deviation from the median. They call an outlier what is above 3.5; the losses of
    small batches scatter more. One percent of the median is the least that stands for the MAD, so that losses that
    hardly differ make no spike of the next one.

    >>> round(spike_score(5.0, [2.0, 2.1, 1.9, 2.2, 1.8]), 2)
    20.23
    """
    median = statistics.median(losses)
    deviation = statistics.median(abs(each - median) for each in losses)
    return 0.6745 * (loss - median) / max(deviation, 0.01 * abs(median), 1e-12)


class _Spike(Exception):
    def __init__(self, loss: float, score: float) -> None:
        super().__init__(f"The loss {loss:.4g} is {score:.1f} robust deviations above that of the steps before.")
        self.loss = loss


def _read(directory: RunDirectory) -> Iterator[BadStep]:
    """The steps that earlier parts of the run passed over; a torn line was never acted on."""
    content = directory.read_bytes(GUARDS_NAME) or b""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        try:
            yield BadStep(**json.loads(line))
        except (ValueError, TypeError):
            where = f"{directory.location}/{GUARDS_NAME}"
            logger.warning("Line %d of %s is not a whole record and is skipped.", number, where)

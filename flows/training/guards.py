"""Guards against steps whose loss is not finite or far above recent losses.

Each minibatch of a step is checked once: before its update is sent if a forward pass comes first, which the policy
`skip` requires, and otherwise after the service has responded to the update. A guard records its decision in
guards.jsonl before the run continues, so that later restarts skip the same steps. Skipped steps leave no trace in the
state of the objective.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from blocks.errors import ConfigError, GuardError, NotFiniteError, PoisonedError, RolledBackError
from blocks.storage import RunDirectory
from flows.config.train import GuardConfig, Policy
from flows.monitoring.events import emit
from flows.monitoring.run_tags import forget_warning, note_end, note_warning
from objectives import errors
from objectives.gradients.linearize import Linearized
from objectives.objective import Objective, ObjectiveState
from tasks.common.jsonl import read_jsonl
from tasks.training.tracking.metrics import MetricsLog

GUARDS_NAME = "guards.jsonl"
_UNTRAINED = "guard.untrained"  # key of the warning


@dataclass(frozen=True, slots=True)
class BadStep:
    """Step that the run skips.

    Attributes:
        step: Index of the step.
        kind: Problem of the step.
        policy: Policy that was applied.
        loss: Loss of the step; None if it is not finite.
        why: Explanation for the user, one sentence.
    """

    step: int
    kind: Literal["not_finite", "spike", "untrained"]
    policy: Policy
    loss: float | None
    why: str


def reason_to_skip(untrained: Sequence[int], num_steps: int, policy: Literal["stop", "skip"]) -> str:
    """Return why steps whose batches have nothing to train are skipped, without a final period.

    Args:
        untrained: at least one such step.

    Raises:
        ConfigError: the policy stops the run, or no step would be left.
    """
    nothing = "nothing to train (no token of non-zero weight, or no pair)"
    if len(untrained) == 1:
        why = f"The batch of step {untrained[0]} has {nothing}"
    else:
        why = f"The batches of {len(untrained)} of {num_steps} steps, first of step {untrained[0]}, have {nothing}"
    if policy == "stop" or len(untrained) == num_steps:
        or_skip = ", or set guards.untrained to skip" if len(untrained) < num_steps else ""
        raise ConfigError(f"{why}: increase max_length or check train_on_what of the data{or_skip}.")
    return why


class Guard:
    """Guards of an open run.

    Attributes:
        skipped_steps: Skipped steps, by index.
    """

    def __init__(
        self, config: GuardConfig, run_name: str, directory: RunDirectory, log: MetricsLog, objective: Objective
    ) -> None:
        self._config, self._run_name, self._directory = config, run_name, directory
        self._log, self._objective = log, objective
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._last_good: int | None = None
        self._before: _Before | None = None
        self.skipped_steps: dict[int, BadStep] = {
            bad_step.step: bad_step for bad_step in read_jsonl(directory, GUARDS_NAME, _parse)
        }

    def check(self, step: int, compute: Callable[[], Linearized], *, checks_spike: bool = True) -> Linearized | None:
        """Compute and check the linearized objective of a minibatch; return None if its step is skipped.

        Skipping restores the objective and the recent losses as they were before the first minibatch of the step.

        Args:
            checks_spike: False for sampled candidates, whose loss is not compared with those of other minibatches.

        Raises:
            GuardError: The step is bad, and the policy stops the run.
            RolledBackError: The step is bad, and the run resumes from its last checkpoint without it.
        """
        if self._config.needs_forward_pass and (self._before is None or self._before.step != step):
            self._before = _Before(step, self._objective.state(), list(self._losses), self._last_good)
        try:
            linearized = compute()
            metrics = self._judge(linearized.total) if checks_spike else {}
        except (errors.NotFiniteError, NotFiniteError) as error:
            self._treat(
                self._blamed(step, error), "not_finite", None, str(error), sent=isinstance(error, PoisonedError)
            )
        except _Spike as spike:
            self._treat(step, "spike", spike.loss, str(spike))
        else:
            self._last_good = step
            return replace(linearized, metrics={**linearized.metrics, **metrics})
        assert self._before is not None, "only the policy skip returns, and it needs a forward pass"
        self._objective.restore(self._before.objective)
        self._losses = deque(self._before.losses, maxlen=self._config.spike_window)
        self._last_good = self._before.last_good
        return None

    def check_batches(self, untrained: Sequence[int], num_steps: int) -> None:
        """Apply the policy to the steps whose batches have nothing to train, before the first step of a run.

        Raises:
            ConfigError: the policy stops the run, or no step would be left.
        """
        recorded = {step for step, bad_step in self.skipped_steps.items() if bad_step.kind == "untrained"}
        is_changed = recorded != {*untrained}
        if not untrained:
            forget_warning(self._log, _UNTRAINED)
        if recorded and is_changed:  # before the data was corrected
            self.skipped_steps = {step: bad for step, bad in self.skipped_steps.items() if bad.kind != "untrained"}
            lines = [json.dumps(asdict(bad_step)) for bad_step in self.skipped_steps.values()]
            self._directory.write_bytes(GUARDS_NAME, "".join(f"{line}\n" for line in lines).encode())
        if not untrained:
            return
        why = reason_to_skip(untrained, num_steps, self._config.untrained)
        if not is_changed:
            return
        bad_steps = [BadStep(step, "untrained", "skip", None, f"{why}.") for step in untrained]
        self._directory.append_line(GUARDS_NAME, "\n".join(json.dumps(asdict(bad_step)) for bad_step in bad_steps))
        self.skipped_steps |= {bad_step.step: bad_step for bad_step in bad_steps}
        text = f"{why}: {len(untrained)} of {num_steps} steps are skipped; increase max_length to train on these rows."
        note_warning(self._log, _UNTRAINED, text)
        content = {"step": untrained[0], "kind": "untrained", "policy": "skip", "loss": None, "message": text}
        emit("guard", self._run_name, content)

    @contextmanager
    def checked_responses(self, step: int) -> Iterator[None]:
        """Apply the policy to non-finite responses of the service about a step's weights or update.

        Raises:
            GuardError, RolledBackError: As for `check`; an update that was sent cannot be skipped, but is rolled back.
        """
        try:
            yield
        except NotFiniteError as error:
            self._treat(self._blamed(step, error), "not_finite", None, str(error), sent=True)

    def check_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Apply the policy to non-finite metrics of an update that the service returned, such as a gradient norm.

        Raises:
            GuardError, RolledBackError: As for `checked_responses`.
        """
        with self.checked_responses(step):
            for key, value in metrics.items():
                if not math.isfinite(value):
                    raise NotFiniteError(
                        f"The service's metric {key} of step {step} is {value}: check the step's data."
                    )

    def metrics(self, step: int) -> dict[str, float]:
        """Return the guard metrics of a step, whether or not it is skipped."""
        metrics = {"guard/num_passed_over": float(sum(skipped <= step for skipped in self.skipped_steps))}
        if bad_step := self.skipped_steps.get(step):
            metrics |= {"guard/passed_over": 1.0}
            metrics |= {"guard/bad_loss": bad_step.loss} if bad_step.loss is not None else {}
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain data."""
        return {"losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an empty one leaves the initial state."""
        self._losses.extend(state.get("losses", ()))

    def _judge(self, loss: float) -> dict[str, float]:
        """Check a loss for a spike, then add it to the recent losses; return its metrics."""
        config, score = self._config, None
        if not math.isfinite(loss):
            raise NotFiniteError(f"The loss is {loss}: check the data of this step.")
        if config.spike != "off" and len(self._losses) == config.spike_window:
            score = spike_score(loss, self._losses)
            if score > config.spike_threshold:
                raise _Spike(loss, score)
        self._losses.append(loss)
        return {} if score is None else {"guard/spike_score": score}

    def _blamed(self, step: int, error: Exception) -> int:
        """Return the step to blame.

        Weights that are broken at the start of a step were broken by the last update before it, whose loss was still
        finite.
        """
        last = self._last_good
        if isinstance(error, PoisonedError) and last is not None and last < step:
            return last if all(skipped in self.skipped_steps for skipped in range(last + 1, step)) else step
        return step

    def _num_bad_before(self, step: int) -> int:
        """Return the number of consecutive bad steps before a step, without those that had nothing to train."""
        count = 0
        for before in range(step - 1, -1, -1):
            if before not in self.skipped_steps:
                break
            count += self.skipped_steps[before].kind != "untrained"
        return count

    def _treat(
        self, step: int, kind: Literal["not_finite", "spike"], loss: float | None, why: str, *, sent: bool = False
    ) -> None:
        """Apply the policy to a bad step; return only if the step is skipped.

        Raises:
            GuardError: The policy stops the run, or too many consecutive steps are bad.
            RolledBackError: The policy is `rollback`.
        """
        configured = self._config.not_finite if kind == "not_finite" else self._config.spike
        policy: Policy = "stop" if configured == "off" else configured
        if sent and policy == "skip":
            policy = "rollback"
        num_before = self._num_bad_before(step)
        is_skipped = step in self.skipped_steps  # so its batch is not the cause, and another restart would not help
        if policy == "stop" or is_skipped or num_before >= self._config.max_in_a_row:
            after = f" after {num_before} consecutive skipped steps" if num_before else ""
            fix = f"set another policy in guards.{kind}" if policy == "stop" else "increase guards.max_in_a_row"
            if is_skipped:
                after, fix = ", which is skipped already", "check the evaluation and the weights at this step"
            message = (
                f"The run stopped at step {step}{after}: {why} No checkpoint contains this step: fix the cause or "
                f"{fix}, then run the same command to resume before this step."
            )
            note_end(self._log, message)
            raise GuardError(message)
        bad_step = BadStep(step, kind, policy, loss, why)
        self._directory.append_line(GUARDS_NAME, json.dumps(asdict(bad_step)))
        self.skipped_steps[step] = bad_step
        text = f"Step {step} is skipped ({policy}). {why}"
        note_warning(self._log, f"guard.{step}", text)
        emit("guard", self._run_name, {"step": step, "kind": kind, "policy": policy, "loss": loss, "message": text})
        if policy == "rollback":
            raise RolledBackError(f"Step {step} is skipped. {why}")


@dataclass(frozen=True, slots=True)
class _Before:
    """State before the first minibatch of a step, restored if the step is skipped."""

    step: int
    objective: ObjectiveState
    losses: list[float]
    last_good: int | None


def spike_score(loss: float, losses: Sequence[float]) -> float:
    """Distance of a loss above the median of recent losses, in robust standard deviations.

    The modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): 0.6745 (x - median) / MAD,
    where MAD is the median absolute deviation from the median. They call scores above 3.5 outliers; the losses of small
    batches scatter more. The MAD is at least one percent of the median, so that nearly constant losses do not turn the
    next loss into a spike.

    >>> round(spike_score(5.0, [2.0, 2.1, 1.9, 2.2, 1.8]), 2)
    20.23
    """
    median = statistics.median(losses)
    deviation = statistics.median(abs(recent - median) for recent in losses)
    return 0.6745 * (loss - median) / max(deviation, 0.01 * abs(median), 1e-12)


class _Spike(Exception):
    def __init__(self, loss: float, score: float) -> None:
        super().__init__(f"The loss {loss:.4g} is {score:.1f} robust deviations above recent losses.")
        self.loss = loss


def _parse(record: dict[str, Any]) -> BadStep:
    return BadStep(**record)

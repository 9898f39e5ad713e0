"""Protocol between a sweep and the backends that run its trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from flows.config.flow_lookup import SweptConfig
from flows.config.rlhf import RlhfConfig
from flows.config.train import TrainConfig
from flows.monitoring.progress import StepCallback


class Runner(Protocol):
    """Backend that runs one trial at a time."""

    def run(self, config: SweptConfig, watch: StepCallback) -> TrialOutcome:
        """Run a trial to its end, passing each step and its metrics to `watch`, which may return a reason to stop."""
        ...

    def request_stop(self) -> None:
        """Have the current trial finish its step, save a checkpoint and stop."""
        ...

    def close(self, *, kill: bool = False) -> None:
        """Release the backend's resources; `kill` aborts the current trial."""
        ...


def measured_config(config: SweptConfig) -> TrainConfig:
    """Return the config of the run that has the sweep's metric: of rlhf, the policy stage."""
    return config.stages()[-1] if isinstance(config, RlhfConfig) else config


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Outcome of an attempt to run a trial.

    Attributes:
        status: `stopped` if the trial ended early on request.
        reason: Cause of a failure or stop, in one sentence.
        retryable: Whether a retry may succeed.
    """

    status: Literal["completed", "stopped", "failed"]
    reason: str = ""
    retryable: bool = False

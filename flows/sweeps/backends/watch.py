"""Observe remote trials through MLflow, and cancel them through Prefect."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.states import Cancelling

from blocks.errors import ServiceError
from flows.monitoring.progress import StepCallback
from flows.sweeps.record import SweepLog
from tasks.common.service_errors import TRANSIENT_ERRORS

POLL_EVERY_S = 2.0


@dataclass(slots=True)
class TrialMonitor:
    """Monitor of a trial's metric: passes each new value to `watch`, which may return a reason to stop.

    Attributes:
        stop_reason: Reason to stop the trial, once `watch` has returned one.
    """

    log: SweepLog
    run_name: str
    metric: str
    watch: StepCallback
    stop_reason: str = ""
    _seen: set[int] = field(default_factory=set)

    def poll(self) -> str:
        """Pass the new values to `watch`; return the reason to stop, or an empty string."""
        with suppress(ServiceError):
            for step, value in self.log.curve(self.log.find_run(self.run_name), self.metric):
                if step not in self._seen and not self.stop_reason:
                    self.stop_reason = self.watch(step, {self.metric: value})
                self._seen.add(step)
        return self.stop_reason


def cancel(run_id: UUID) -> None:
    """Cancel a flow run and its child runs (the stages of rlhf); each finishes its step and saves a checkpoint.

    Does nothing if Prefect does not respond, so callers call it again at the next poll.
    """
    child_runs = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run_id]))
    with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
        for run in (client.read_flow_run(run_id), *client.read_flow_runs(flow_run_filter=child_runs)):
            if run.state and not run.state.is_final() and not run.state.is_cancelling():
                client.set_flow_run_state(run.id, Cancelling())

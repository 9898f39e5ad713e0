"""Run trials as flow runs of a deployment, observed through MLflow and Prefect."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from itertools import count
from typing import cast
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from blocks.errors import ConfigError, ServiceError
from flows.config.flow_lookup import SweptConfig
from flows.monitoring.progress import StepCallback
from flows.runs.rights import signature_tags
from flows.sweeps.backends.process import completed_outcome
from flows.sweeps.backends.watch import POLL_EVERY_S, TrialMonitor, cancel
from flows.sweeps.protocols import TrialOutcome, measured_config
from flows.sweeps.record import SweepLog
from tasks.common.service_errors import TRANSIENT_ERRORS


def check_deployment(name: str) -> None:
    """Check that the Prefect server has a deployment.

    Raises:
        ConfigError: The deployment does not exist.
    """
    try:
        with get_client(sync_client=True) as client:
            client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        raise ConfigError(
            f"The Prefect server has no deployment {name!r}: deploy the flow, or remove the field `deployment`."
        ) from error


class TrialDeployment:
    """Runner of trials as flow runs of a deployment; each one is a child of the current flow run."""

    def __init__(self, name: str, log: SweepLog, metric: str) -> None:
        self._name, self._log, self._metric = name, log, metric
        self._running: UUID | None = None
        self._stopping = False

    def run(self, config: SweptConfig, watch: StepCallback) -> TrialOutcome:
        """Run the config on a worker to its end; `watch` receives the logged values of the metric."""
        try:
            run = self._begin(config)
            self._running = run.id
            return self._wait(run.id, TrialMonitor(self._log, measured_config(config).run_name, self._metric, watch))
        except (*TRANSIENT_ERRORS, ServiceError) as error:
            return TrialOutcome("failed", f"The deployment could not run the trial: {error}", True)
        finally:
            self._running = None

    def request_stop(self) -> None:
        """Cancel the current trial, which then finishes its step and saves a checkpoint."""
        self._stopping = True
        if self._running:
            cancel(self._running)

    def close(self, *, kill: bool = False) -> None:
        """Cancel the current trial if `kill` is set."""
        if kill:
            self.request_stop()

    def _begin(self, config: SweptConfig) -> FlowRun:
        """Create a flow run, or return that of an earlier start of the sweep if it still runs or has completed."""
        for attempt in count():
            # The server returns the same flow run for the same key.
            key = f"{self._log.run_id}-{config.run_name}-{attempt}"
            fields = config.model_dump(mode="json")
            tags = signature_tags(self._name.partition("/")[0], fields)
            begin = partial(run_deployment, self._name, flow_run_name=config.run_name, timeout=0, idempotency_key=key)
            # Returns a coroutine only inside an event loop.
            run = cast(FlowRun, begin(parameters={"config": fields}, tags=tags))
            if not run.state or not run.state.is_final() or run.state.is_completed():
                return run
        raise AssertionError("unreachable: the server has finitely many attempts")

    def _wait(self, run_id: UUID, monitor: TrialMonitor) -> TrialOutcome:
        while True:
            with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
                state = client.read_flow_run(run_id).state
                if state and state.is_final():
                    break
            if monitor.poll() or self._stopping:  # at each poll, because rlhf may have begun its next stage
                cancel(run_id)
            time.sleep(POLL_EVERY_S)
        if state.is_completed():
            return completed_outcome(state)
        if state.is_cancelled() or monitor.stop_reason or self._stopping:
            return TrialOutcome("stopped", monitor.stop_reason)
        return TrialOutcome("failed", state.message or f"The flow run ended in the state {state.name}.", True)

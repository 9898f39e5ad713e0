"""Run trials on the workers of an existing Dask or Ray cluster, or of one that the sweep starts on this machine."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterParentFlowRunId
from prefect.runtime import flow_run

from blocks.errors import first_line
from flows.config.flow_lookup import SweptConfig
from flows.config.train import TaskRunnerConfig
from flows.monitoring.progress import StepCallback
from flows.runs.task_runner import open_dask, open_ray
from flows.sweeps.backends.watch import POLL_EVERY_S, TrialMonitor, cancel
from flows.sweeps.backends.worker import pack_trial, run_on_worker
from flows.sweeps.protocols import TrialOutcome, measured_config
from flows.sweeps.record import SweepLog
from tasks.common.service_errors import TRANSIENT_ERRORS

Cluster = Literal["dask", "ray"]


class TrialCluster:
    """Runner of trials on cluster workers; each trial is a child of the current flow run."""

    def __init__(self, cluster: Cluster, flow: str, log: SweepLog, metric: str) -> None:
        """Connect to the cluster, or start one.

        Dask starts a cluster of one worker for each runner, Ray one cluster for all runners.

        Raises:
            ConfigError: The cluster's extra is not installed, or the cluster is unreachable or has no workers.
        """
        self._cluster, self._flow, self._log, self._metric = cluster, flow, log, metric
        self._sweep = UUID(flow_run.get_id())
        self._stopping = False
        self._opened = ExitStack()
        self._runner = self._opened.enter_context(
            open_dask(TaskRunnerConfig(kind="dask", workers=1))  # a runner has one trial at a time
            if cluster == "dask"
            else open_ray(TaskRunnerConfig(kind="ray"))
        )

    def run(self, config: SweptConfig, watch: StepCallback) -> TrialOutcome:
        """Run the config on a worker to its end; `watch` receives the logged values of the metric."""
        # The run of the policy stage logs the metric of `rlhf`, but the flow run to cancel is that of the whole trial.
        monitor = TrialMonitor(self._log, measured_config(config).run_name, self._metric, watch)
        try:
            future = self._submit(pack_trial(self._flow, config))
            while not future.done():
                with suppress(TimeoutError):
                    future.result(timeout=POLL_EVERY_S)
                if not future.done() and (monitor.poll() or self._stopping):
                    self._cancel(config.run_name)
            outcome: TrialOutcome = future.result()
        except Exception as error:  # noqa: BLE001  # any error of a worker or the cluster
            why = f"The trial's {self._cluster} worker failed ({first_line(error)})."
            return TrialOutcome("stopped") if self._stopping else TrialOutcome("failed", why, retryable=True)
        return TrialOutcome("stopped", monitor.stop_reason) if outcome.status == "stopped" else outcome

    def request_stop(self) -> None:
        """Cancel the current trial as soon as its flow run exists."""
        self._stopping = True

    def close(self, *, kill: bool = False) -> None:
        """Disconnect from the cluster; a cluster that this runner started is shut down.

        Args:
            kill: report the current trial as stopped instead of failed.
        """
        self._stopping = self._stopping or kill
        self._opened.close()

    def _submit(self, packed: bytes) -> Any:
        if self._cluster == "dask":
            return self._runner.client.submit(run_on_worker, packed, pure=False)
        import ray  # pyright: ignore[reportMissingImports]

        return ray.remote(run_on_worker).remote(packed).future()

    def _cancel(self, run_name: str) -> None:
        trial_runs = FlowRunFilter(
            name=FlowRunFilterName(any_=[run_name]),
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[self._sweep]),
        )
        with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
            for trial_run in client.read_flow_runs(flow_run_filter=trial_runs):
                cancel(trial_run.id)

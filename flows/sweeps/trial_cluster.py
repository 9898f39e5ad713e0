"""Trials on the workers of a Dask or Ray cluster: the one that the environment names, or one for the sweep alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterParentFlowRunId
from prefect.runtime import flow_run

from blocks.errors import ConfigError
from flows.config import RunConfig
from flows.sweeps.record import SweepLog
from flows.sweeps.trial_on_worker import pack_trial, run_on_worker
from flows.sweeps.trial_process import End
from flows.sweeps.trial_watch import LOOK_EVERY_S, PASSING, Watched, cancel
from objectives.errors import ExecutionError
from objectives.execution.cluster import first_line
from objectives.execution.dask_tasks import DASK
from objectives.execution.ray_actors import RAY

Cluster = Literal["dask", "ray"]


class TrialCluster:
    """Runs one config after another on whichever worker is free, each as a child of the flow run under way."""

    def __init__(self, cluster: Cluster, flow: str, log: SweepLog, metric: str) -> None:
        """Connect to the cluster, or start one.

        Raises:
            ConfigError: its extra is not installed, or it cannot be reached.
        """
        self._cluster, self._flow, self._log, self._metric = cluster, flow, log, metric
        self._sweep = UUID(flow_run.get_id())
        self._stopping = False
        try:
            (DASK if cluster == "dask" else RAY).use(self)
        except ExecutionError as error:
            raise ConfigError(f"The sweep's cluster is {cluster}, and {error}.") from error

    def run(self, config: RunConfig, watch: Callable[[int, Mapping[str, float]], str]) -> End:
        """Have a worker run the config to its end; a metric that it logs is shown to `watch`."""
        watched = Watched(self._log, config.run_name, self._metric, watch)
        try:
            future = self._submit(pack_trial(self._flow, config))
            while True:
                with suppress(TimeoutError):
                    end: End = future.result(timeout=LOOK_EVERY_S)
                    break
                if watched.look() or self._stopping:
                    self._cancel(config.run_name)
        except Exception as error:  # noqa: BLE001  # whatever became of a worker or of the cluster
            why = f"Its worker of the {self._cluster} cluster did not finish it ({first_line(error)})."
            return End("stopped") if self._stopping else End("failed", why, True)
        return End("stopped", watched.asked) if end.how == "stopped" else end

    def ask_to_stop(self) -> None:
        """Have the run under way end its step and save it, as soon as it has begun."""
        self._stopping = True

    def close(self, *, kill: bool = False) -> None:
        """Let go of the cluster, which ends with its workers where it is the sweep's own."""
        self._stopping = self._stopping or kill
        (DASK if self._cluster == "dask" else RAY).leave(self)

    def _submit(self, packed: bytes) -> Any:
        if self._cluster == "dask":
            return DASK.use(self).client.submit(run_on_worker, packed, pure=False)
        return RAY.use(self).ray.remote(run_on_worker).remote(packed).future()

    def _cancel(self, run_name: str) -> None:
        mine = FlowRunFilter(
            name=FlowRunFilterName(any_=[run_name]),
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[self._sweep]),
        )
        with suppress(*PASSING), get_client(sync_client=True) as client:
            for each in client.read_flow_runs(flow_run_filter=mine):
                cancel(each.id)

"""Trials on the workers of a deployment: sent there, watched in MLflow and in Prefect, wherever they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
from flows.config import RunConfig
from flows.sweeps.record import SweepLog
from flows.sweeps.trial_process import End
from flows.sweeps.trial_watch import LOOK_EVERY_S, PASSING, Watched, cancel


def check_deployment(name: str) -> None:
    """Refuse a deployment that the Prefect server does not have.

    Raises:
        ConfigError: there is none of this name.
    """
    try:
        with get_client(sync_client=True) as client:
            client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        raise ConfigError(
            f"There is no deployment {name!r} on the Prefect server: deploy the flow, or leave deployment out."
        ) from error


class TrialDeployment:
    """Runs one config after another by a deployment, each as a child of the flow run under way."""

    def __init__(self, name: str, log: SweepLog, metric: str) -> None:
        self._name, self._log, self._metric = name, log, metric
        self._running: UUID | None = None
        self._stopping = False

    def run(self, config: RunConfig, watch: Callable[[int, Mapping[str, float]], str]) -> End:
        """Have a worker run the config to its end; a metric that it logs is shown to `watch`."""
        try:
            run = self._begin(config)
            self._running = run.id
            return self._wait(run.id, Watched(self._log, config.run_name, self._metric, watch))
        except (*PASSING, ServiceError) as error:
            return End("failed", f"Its deployment could not run: {error}", True)
        finally:
            self._running = None

    def ask_to_stop(self) -> None:
        """Cancel the run under way, which then ends its step and saves it."""
        self._stopping = True
        if self._running:
            cancel(self._running)

    def close(self, *, kill: bool = False) -> None:
        """Nothing is held open; what still runs is cancelled."""
        if kill:
            self.ask_to_stop()

    def _begin(self, config: RunConfig) -> FlowRun:
        """A new flow run, or the one that an earlier part of the sweep began and that has not ended badly."""
        for attempt in count():
            # The server returns the same run for the same key.
            key = f"{self._log.run_id}-{config.run_name}-{attempt}"
            fields = config.model_dump(mode="json")
            begin = partial(run_deployment, self._name, flow_run_name=config.run_name, timeout=0, idempotency_key=key)
            run = cast(FlowRun, begin(parameters={"config": fields}))  # a coroutine only on an event loop
            if not run.state or not run.state.is_final() or run.state.is_completed():
                return run
        raise AssertionError("unreachable: some attempt is new")

    def _wait(self, run_id: UUID, watched: Watched) -> End:
        while True:
            with suppress(*PASSING), get_client(sync_client=True) as client:
                state = client.read_flow_run(run_id).state
                if state and state.is_final():
                    break
            if watched.look():
                cancel(run_id)
            time.sleep(LOOK_EVERY_S)
        if state.is_completed():
            return End("completed")
        if state.is_cancelled() or watched.asked or self._stopping:
            return End("stopped", watched.asked)
        return End("failed", state.message or f"It ended as {state.name}.", True)

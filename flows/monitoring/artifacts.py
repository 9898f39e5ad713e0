"""Artifacts on a run's page in the Prefect UI: progress, table of terms, link to the MLflow run.

A background thread sends them every few seconds. It ignores errors of the server, and no step waits for the thread. The
thread ends if another process has taken over the run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Self
from uuid import UUID

from mlflow.exceptions import MlflowException
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext

from blocks.errors import LostRunError, StorageError
from tasks.common.service_errors import TRANSIENT_ERRORS
from tasks.reports.html import artifact_key, escape_markdown
from tasks.reports.summary import format_steps
from tasks.reports.tables import COLUMNS, format_figure, format_row, term_rows
from tasks.training.tracking.metrics import MetricsLog

EVERY_S = 2.0
# The last update is tried again, because no later one makes up for it.
_NUM_RETRIES, _RETRY_AFTER_S = 4, 1.0
# Errors of Prefect's and MLflow's clients if a server is down or another program responds in its place.
_TRANSIENT_ERRORS = (*TRANSIENT_ERRORS, MlflowException)


class RunPage:
    """Artifacts of a run's flow run; does nothing outside a flow run."""

    def __init__(self, run_name: str, num_done: int, num_steps: int, log: MetricsLog) -> None:
        self._run_name, self._num_steps, self._log = run_name, num_steps, log
        self._done, self._metrics = num_done, dict[str, float]()
        self._sent: dict[str, tuple[UUID, tuple[str | float, str]]] = {}
        self._ended = threading.Event()
        context = FlowRunContext.get()
        self._flow_run_id = context.flow_run.id if context and context.flow_run else None
        # The context names the Prefect server; without it, Prefect would start an ephemeral one.
        context_run = copy_context().run
        self._thread = threading.Thread(
            target=context_run, args=(self._update_until_stopped,), name="page", daemon=True
        )

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Count a step; terms that the step did not evaluate keep their last metrics."""
        self._metrics = {**self._metrics, **metrics}
        self._done += 1

    def __enter__(self) -> Self:
        if self._flow_run_id:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._flow_run_id:
            self._thread.join(5.0)  # bounded, because the server may not respond

    def _update_until_stopped(self) -> None:
        with suppress(LostRunError):
            self._update_periodically()

    def _update_periodically(self) -> None:
        num_retries = 0
        while num_retries <= _NUM_RETRIES:
            try:
                with get_client(sync_client=True) as client:
                    self._link(client)
                    while not self._ended.is_set():
                        self._update(client)
                        self._ended.wait(EVERY_S)
                    self._update(client)
                    return
            except LostRunError:
                raise
            except (*_TRANSIENT_ERRORS, StorageError):
                pass  # try again below
            if self._ended.wait(EVERY_S):
                num_retries += 1
                time.sleep(_RETRY_AFTER_S)

    def _link(self, client: SyncPrefectClient) -> None:
        """Link to the MLflow run if MLflow has a web address."""
        uri = self._log.client.tracking_uri.rstrip("/")
        if uri.startswith("http") and "mlflow" not in self._sent:
            experiment = self._log.client.get_run(self._log.run_id).info.experiment_id
            page = f"{uri}/#/experiments/{experiment}/runs/{self._log.run_id}"
            link = f"[MLflow run of {escape_markdown(self._run_name)}]({page})"
            self._put(client, "mlflow", "markdown", link, "Every metric")

    def _update(self, client: SyncPrefectClient) -> None:
        step, metrics = self._done, self._metrics
        losses = [f"{key} {format_figure(metrics[key])}" for key in ("loss/total", "train_mean_nll") if key in metrics]
        description = ", ".join([f"{escape_markdown(self._run_name)}: {format_steps(step, self._num_steps)}", *losses])
        self._put(client, "progress", "progress", 100.0 * step / self._num_steps, description)
        rows = [dict(zip(COLUMNS, format_row(row), strict=True)) for row in term_rows(metrics)]
        if rows:
            description = f"Terms of {escape_markdown(self._run_name)} after {step} step{'s' if step != 1 else ''}"
            self._put(client, "terms", "table", json.dumps(rows), description)

    def _put(self, client: SyncPrefectClient, kind: str, form: str, data: str | float, description: str) -> None:
        """Create an artifact of the run, or update it if its content changed."""
        artifact_id, content = self._sent.get(kind, (None, None))
        if content == (data, description):
            return
        self._log.check_writer()
        if artifact_id:
            client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=description))
        else:
            key = artifact_key(kind, self._run_name)
            artifact = ArtifactCreate(
                key=key, type=form, data=data, description=description, flow_run_id=self._flow_run_id
            )
            artifact_id = client.create_artifact(artifact).id
        self._sent[kind] = artifact_id, (data, description)

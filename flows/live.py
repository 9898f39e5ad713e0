"""A run on its page in the Prefect UI while it goes on: how far it is, what its terms do, where its MLflow run is.

Sent by a thread of its own every few seconds, and what the server does not take is left out: no step waits for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import httpx
from mlflow.exceptions import MlflowException
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException

from tasks.metrics import MetricsLog
from tasks.page import artifact_key
from tasks.term_table import COLUMNS, cells, term_rows

EVERY_S = 2.0
# What the clients raise of a server that is down, and of an answer that is not a server's.
_PASSING = (httpx.HTTPError, MlflowException, PrefectException, RuntimeError, ValueError)


class Live:
    """The artifacts of one part of a run; without a flow run around it, it does nothing."""

    def __init__(self, run_name: str, first: int, num_steps: int, log: MetricsLog) -> None:
        self._run_name, self._num_steps, self._log = run_name, num_steps, log
        self._done, self._metrics = first, dict[str, float]()
        self._sent: dict[str, tuple[UUID, Any]] = {}
        self._ended = threading.Event()
        context = FlowRunContext.get()
        self._flow_run_id = context.flow_run.id if context and context.flow_run else None
        # In this thread's context, which names the server: outside of it, Prefect would start an ephemeral one.
        self._thread = threading.Thread(target=copy_context().run, args=(self._follow,), name="live", daemon=True)

    def advance(self, metrics: Mapping[str, float]) -> None:
        """One step is done; a term that it did not evaluate is shown as it was."""
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
            self._thread.join(5.0)  # it may be waiting for a server that is gone

    def _follow(self) -> None:
        while not self._ended.is_set():
            with suppress(*_PASSING), get_client(sync_client=True) as client:
                self._link(client)
                while not self._ended.is_set():
                    self._show(client)
                    self._ended.wait(EVERY_S)
                self._show(client)
            self._ended.wait(EVERY_S)

    def _link(self, client: SyncPrefectClient) -> None:
        """The MLflow run, where a browser can go to."""
        uri = self._log.client.tracking_uri.rstrip("/")
        if uri.startswith("http") and "mlflow" not in self._sent:
            experiment = self._log.client.get_run(self._log.run_id).info.experiment_id
            page = f"{uri}/#/experiments/{experiment}/runs/{self._log.run_id}"
            self._put(client, "mlflow", "markdown", f"[MLflow run of {self._run_name}]({page})", "Every metric")

    def _show(self, client: SyncPrefectClient) -> None:
        done, metrics = self._done, self._metrics
        losses = [f"{key} {metrics[key]:.4g}" for key in ("loss/total", "train_mean_nll") if key in metrics]
        said = ", ".join([f"{self._run_name}: step {done} of {self._num_steps}", *losses])
        self._put(client, "progress", "progress", 100.0 * done / self._num_steps, said)
        rows = [dict(zip(COLUMNS, cells(row), strict=True)) for row in term_rows(metrics)]
        if rows:
            self._put(client, "terms", "table", json.dumps(rows), f"Terms of {self._run_name} after step {done}")

    def _put(self, client: SyncPrefectClient, kind: str, form: str, data: Any, said: str) -> None:
        """Create an artifact of the run, or change it where there is something new."""
        artifact_id, shown = self._sent.get(kind, (None, None))
        if shown == (data, said):
            return
        if artifact_id:
            client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=said))
        else:
            key = artifact_key(kind, self._run_name)
            made = ArtifactCreate(key=key, type=form, data=data, description=said, flow_run_id=self._flow_run_id)
            artifact_id = client.create_artifact(made).id
        self._sent[kind] = artifact_id, (data, said)

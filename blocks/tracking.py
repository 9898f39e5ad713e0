"""The MLflow tracking server, as a Prefect block."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from prefect.blocks.core import Block
from pydantic import Field
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from blocks.errors import ServiceError, TinkerFlowsError, reason
from blocks.home import home, one_at_a_time
from blocks.reach import check_answers

_FIRST_ANSWER_S = 20.0
_REMEDY = "check tracking.uri, or leave it out for a local SQLite file"

# Of a run: which record it belongs to.
RECORD_TAG = "tinker_flows.record"


class MLflowTracking(Block):
    """Where metrics, parameters and reports go: an MLflow tracking server or a local SQLite file.

    Example:
        ```python
        from blocks import MLflowTracking

        tracking = MLflowTracking.load("BLOCK_NAME")
        client = tracking.get_client()
        runs = client.search_runs([tracking.experiment_id(client)])
        ```
    """

    _block_type_name = "MLflow Tracking"
    _block_type_slug = "tinker-flows-mlflow-tracking"
    _description = "The MLflow tracking server that tinker-flows runs log every term of every step to."

    tracking_uri: str = Field(
        default="",
        title="Tracking URI",
        description="http(s):// of a server or sqlite:///path; empty means MLFLOW_TRACKING_URI, and without it "
        "mlflow.db in the project's home.",
    )
    experiment: str = Field(
        default="tinker-flows",
        title="Experiment",
        description="MLflow experiment that runs are listed under.",
        min_length=1,
    )

    @property
    def resolved_uri(self) -> str:
        """The tracking URI in force, with environment and default filled in."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"

    def get_client(self) -> MlflowClient:
        """A client for this server; the experiment exists when it returns.

        Raises:
            ServiceError: the server does not answer, refuses, or the URI is none of MLflow's.
        """
        uri = self.resolved_uri
        if uri.startswith(("http://", "https://")):
            check_answers(f"The MLflow server at {uri}", f"{uri.rstrip('/')}/health", _FIRST_ANSWER_S, _REMEDY)
        with self.failures(), _opening(uri):
            client = MlflowClient(tracking_uri=uri)
            self._experiment_id(client)
            return client

    def experiment_id(self, client: MlflowClient) -> str:
        """The id of the experiment, made when missing.

        Raises:
            ServiceError: it is deleted, or the server does not answer.
        """
        with self.failures():
            return self._experiment_id(client)

    def recorded_run(self, client: MlflowClient, run_name: str, record: str, tags: Mapping[str, str]) -> Run:
        """The one run of a record, found by its tag and made with it when missing.

        MLflow's client asks again for a run when the answer was lost on its way, and then has made two: the one that
        nobody logs to is deleted.

        Raises:
            ServiceError: the server does not answer.
        """
        with self.failures():
            experiment = self._experiment_id(client)

            def find() -> list[Run]:
                found = client.search_runs([experiment], f"tags.`{RECORD_TAG}` = '{record}'")
                return sorted(found, key=lambda run: (not run.data.metrics, run.info.start_time, run.info.run_id))

            if not (runs := find()):
                client.create_run(experiment, run_name=run_name, tags={**tags, RECORD_TAG: record})
                runs = find()
            for other in runs[1:]:
                if not other.data.metrics:
                    client.delete_run(other.info.run_id)
            return runs[0]

    def _experiment_id(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            # A database without a server would put artifacts below whatever directory the process happens to be in.
            dialect = self.resolved_uri.partition(":")[0].partition("+")[0]
            location = (home() / "mlflow-artifacts").as_uri() if dialect in DATABASE_ENGINES else None
            try:
                return client.create_experiment(self.experiment, artifact_location=location)
            except MlflowException:
                found = client.get_experiment_by_name(self.experiment)  # another run made it meanwhile
                if found is None:
                    raise
        if found.lifecycle_stage == LifecycleStage.DELETED:
            raise ServiceError(
                f"The MLflow experiment {self.experiment!r} at {self.resolved_uri} is deleted: "
                f"restore it (`mlflow experiments restore -x {found.experiment_id}`) or choose another experiment."
            )
        return found.experiment_id

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turn what MLflow raises into a `ServiceError` that says which server could not be used."""
        try:
            yield
        except TinkerFlowsError:
            raise
        except (MlflowException, SQLAlchemyError, sqlite3.Error, ImportError, OSError) as error:
            raise ServiceError(
                f"The MLflow server at {self.resolved_uri} could not be used ({reason(error)}): {_REMEDY}."
            ) from error


@contextmanager
def _opening(uri: str) -> Iterator[None]:
    """One process at a time opens a SQLite file: two that make its tables at once break each other."""
    name = make_url(uri).database if uri.startswith("sqlite:") else None
    if name is None:
        yield
        return
    database = Path(name)
    database.parent.mkdir(parents=True, exist_ok=True)
    # MLflow itself goes on for minutes trying a file that cannot be opened.
    with closing(sqlite3.connect(database, timeout=_FIRST_ANSWER_S)) as connection:
        connection.execute("PRAGMA schema_version")
    with one_at_a_time(database.with_name(f".{database.name}.lock")):
        yield

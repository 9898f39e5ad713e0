"""Prefect block for MLflow tracking."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.blocks.core import Block
from pydantic import Field

from blocks.errors import ServiceError, TinkerFlowsError, reason
from blocks.files.local import file_lock, home, open_private, private_folder
from blocks.servers.database_templates import MLFLOW_TEMPLATE, is_missing
from blocks.urls import check_no_credentials, check_reachable, hide_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_FIRST_RESPONSE_S = 20.0
_LOGIN = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to those of the server (`tinker-flows up` prints them)"
)
_REMEDY = "check `tracking`, or leave it out for a local SQLite file"
_DRIVER_REMEDIES = {
    "psycopg": "install it with pip install 'tinker-flows[postgres]'",
    "psycopg2": "start its URL with postgresql+psycopg://, for the driver of the extra tinker-flows[postgres]",
}
_FILE_REMEDY = "check its folder and the free space, or set `tracking` to another store"

# Tag of an MLflow run: the key of the run directory (the record) that it belongs to.
RECORD_TAG = "tinker_flows.record"


# With this tag, MLflow's UI opens the view of training runs instead of the view of evaluation runs.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


class MLflowTracking(Block):
    """Destination of metrics, parameters and reports: an MLflow tracking server or a local SQLite file.

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
    _description = "MLflow tracking server where tinker-flows runs log every term of every step."

    tracking_uri: str = Field(
        default="",
        title="Tracking URI",
        description="http(s):// URL of a server, or sqlite:///path; empty means MLFLOW_TRACKING_URI or, if that is "
        "unset, mlflow.db in the project home.",
    )
    experiment: str = Field(
        default="tinker-flows",
        title="Experiment",
        description="MLflow experiment that lists the runs.",
        min_length=1,
    )

    @property
    def resolved_uri(self) -> str:
        """Effective tracking URI: the field, the environment or the default."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"

    @property
    def shown_uri(self) -> str:
        """Effective tracking URI without the user name and password of a database."""
        return hide_credentials(self.resolved_uri)

    def get_client(self) -> MlflowClient:
        """Return a client for this server; create the experiment if missing.

        Raises:
            ServiceError: the server does not respond or rejects the request, the experiment is deleted, or MLflow does
                not support the URI.
            ConfigError: the URL of a server has a user name or password.
        """
        from mlflow import MlflowClient

        uri = self.resolved_uri
        if uri.startswith(("http://", "https://")):
            fix = "remove it and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            check_no_credentials(uri, "The MLflow URL", fix)
            check_reachable(f"The MLflow server at {uri}", f"{uri.rstrip('/')}/health", _FIRST_RESPONSE_S, _REMEDY)
        with self.failures(), _sqlite_lock(uri) as database:
            # A missing database is copied from the template. Without a template, MLflow creates the database, and the
            # template is made from it.
            makes_template = database is not None and is_missing(database) and not MLFLOW_TEMPLATE.prepare(database)
            client = MlflowClient(tracking_uri=uri)
            self._experiment_id(client)
            if database is not None and makes_template:
                MLFLOW_TEMPLATE.save(database)
            return client

    def experiment_id(self, client: MlflowClient) -> str:
        """Return the id of the experiment; create the experiment if missing.

        Raises:
            ServiceError: the experiment is deleted, or the server does not respond.
        """
        with self.failures():
            return self._experiment_id(client)

    def find_or_create_run(self, client: MlflowClient, run_name: str, record: str, tags: Mapping[str, str]) -> Run:
        """Return the MLflow run tagged with a record; create it if missing.

        MLflow's client retries a request whose response was lost, which can create the run twice. The oldest run with
        metrics is kept, or else the oldest; other runs without metrics are deleted.

        Raises:
            ServiceError: the experiment is deleted, or the server does not respond.
        """
        with self.failures():
            experiment = self._experiment_id(client)

            def search() -> list[Run]:
                runs = client.search_runs([experiment], f"tags.`{RECORD_TAG}` = '{record}'")
                return sorted(runs, key=lambda run: (not run.data.metrics, run.info.start_time, run.info.run_id))

            if not (runs := search()):
                client.create_run(experiment, run_name=run_name, tags={**tags, RECORD_TAG: record})
                runs = search()
            for duplicate in runs[1:]:
                if not duplicate.data.metrics:
                    client.delete_run(duplicate.info.run_id)
            return runs[0]

    def _experiment_id(self, client: MlflowClient) -> str:
        """Return the id of the experiment as `experiment_id`, but raise MLflow's exceptions unchanged."""
        from mlflow.entities import LifecycleStage
        from mlflow.exceptions import MlflowException

        from blocks.mlflow_internals import DATABASE_ENGINES

        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            # Without an explicit location, MLflow would put artifacts below the current directory of the process.
            dialect = self.resolved_uri.partition(":")[0].partition("+")[0]
            location = None
            if dialect in DATABASE_ENGINES:
                private_folder(home() / "mlflow-artifacts")
                location = (home() / "mlflow-artifacts").as_uri()
            try:
                return client.create_experiment(self.experiment, location, _EXPERIMENT_TAGS)
            except MlflowException:
                experiment = client.get_experiment_by_name(self.experiment)  # another run may have created it
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == LifecycleStage.DELETED:
            raise ServiceError(
                f"The MLflow experiment {self.experiment!r} at {self.shown_uri} is deleted: "
                f"restore it (`mlflow experiments restore -x {experiment.experiment_id}`) or choose another experiment."
            )
        return experiment.experiment_id

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert exceptions of MLflow and its database into a `ServiceError` that names the server."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except TinkerFlowsError:
            raise
        except (MlflowException, *_database_errors(), sqlite3.Error, ImportError, OSError) as error:
            if isinstance(error, MlflowException) and error.get_http_status_code() == HTTPStatus.UNAUTHORIZED:
                raise ServiceError(
                    f"The MLflow server at {self.shown_uri} rejects the login (401): {_LOGIN}."
                ) from error
            is_file = self.shown_uri.startswith("sqlite:")
            store = f"The MLflow database {self.shown_uri}" if is_file else f"The MLflow server at {self.shown_uri}"
            remedy = _FILE_REMEDY if is_file else _REMEDY
            if isinstance(error, ImportError):
                remedy = _DRIVER_REMEDIES.get(error.name or "", remedy)
            raise ServiceError(f"{store} could not be used ({hide_credentials(reason(error))}): {remedy}.") from error


def _database_errors() -> tuple[type[Exception], ...]:
    """Return the base class of SQLAlchemy's errors; nothing if SQLAlchemy is not imported, as with an MLflow server."""
    module = sys.modules.get("sqlalchemy.exc")
    return (module.SQLAlchemyError,) if module else ()


@contextmanager
def _sqlite_lock(uri: str) -> Iterator[Path | None]:
    """Let one process at a time open a SQLite file: two processes that create its tables concurrently both fail.

    Yields the file, or None for another store.
    """
    if not uri.startswith("sqlite:"):
        yield None
        return
    from sqlalchemy import make_url

    name = make_url(uri).database
    if name is None:
        yield None
        return
    database = Path(name)
    private_folder(database.parent)
    open_private(database, "ab").close()  # SQLite opens an empty file as a new database
    # Fail fast: MLflow retries for minutes if the file cannot be opened.
    with closing(sqlite3.connect(database, timeout=_FIRST_RESPONSE_S)) as connection:
        connection.execute("PRAGMA schema_version")
    with file_lock(database.with_name(f".{database.name}.lock")):
        yield database.absolute()

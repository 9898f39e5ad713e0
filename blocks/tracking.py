"""The MLflow tracking server, as a Prefect block."""

from __future__ import annotations

import os

from prefect.blocks.core import Block
from pydantic import Field

from blocks.errors import ServiceError
from blocks.home import home

# MLflow's own patience with a server that is not there is four minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException


class MLflowTracking(Block):
    """Where metrics, parameters and reports go: an MLflow tracking server or a local SQLite file."""

    _block_type_name = "MLflow Tracking"
    _block_type_slug = "tinker-flows-mlflow-tracking"
    _description = "The MLflow tracking server that tinker-flows runs log every term of every step to."

    tracking_uri: str = Field(
        default="",
        title="Tracking URI",
        description="http(s):// of a server or sqlite:///path; empty means mlflow.db in the project's home.",
    )
    experiment: str = Field(
        default="tinker-flows",
        title="Experiment",
        description="MLflow experiment that runs are listed under.",
    )

    @property
    def resolved_uri(self) -> str:
        """The tracking URI in force, with the default filled in."""
        return self.tracking_uri or f"sqlite:///{home() / 'mlflow.db'}"

    def get_client(self) -> MlflowClient:
        """A client for this server; the experiment exists when it returns.

        Raises:
            ServiceError: the server does not answer or refuses the URI.
        """
        try:
            client = MlflowClient(tracking_uri=self.resolved_uri)
            self.experiment_id(client)
        except MlflowException as error:
            raise ServiceError(
                f"The MLflow server at {self.resolved_uri!r} could not be used ({_first_line(error)}): "
                "check tracking.uri, or leave it out for a local SQLite file."
            ) from error
        return client

    def experiment_id(self, client: MlflowClient) -> str:
        """The id of the experiment, made when missing."""
        found = client.get_experiment_by_name(self.experiment)
        if found is not None:
            return found.experiment_id
        # A SQLite store would put artifacts below whatever directory the process happens to be in.
        local = self.resolved_uri.startswith("sqlite:")
        location = (home() / "mlflow-artifacts").as_uri() if local else None
        try:
            return client.create_experiment(self.experiment, artifact_location=location)
        except MlflowException:
            found = client.get_experiment_by_name(self.experiment)  # another run made it meanwhile
            if found is None:
                raise
            return found.experiment_id


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

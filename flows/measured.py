"""The MLflow run of a flow that measures weights and trains none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from mlflow.entities import Param

from blocks.errors import ServiceError
from flows.blocks_of import tracking_of
from flows.config import TrackedConfig
from flows.record import flatten, origin_tags
from tasks.metrics import MetricsLog


@contextmanager
def open_measurement(
    config: TrackedConfig, run_name: str, service_url: str, tags: Mapping[str, str]
) -> Iterator[MetricsLog]:
    """An MLflow run with the config as its parameters, marked finished or failed at the end.

    Raises:
        ServiceError: MLflow does not answer or refuses.
    """
    tracking = tracking_of(config)
    client = tracking.get_client()
    with tracking.failures():
        run = client.create_run(
            tracking.experiment_id(client), run_name=run_name, tags={**origin_tags(service_url), **tags}
        )
        params = [Param(key, str(value)[:6000]) for key, value in flatten(config.model_dump(mode="json")).items()]
        client.log_batch(run.info.run_id, params=params)
        log = MetricsLog(client, run.info.run_id)
    status = "FAILED"
    try:
        yield log
        log.flush()
        status = "FINISHED"
    finally:
        with suppress(ServiceError), tracking.failures():
            client.set_terminated(run.info.run_id, status=status)

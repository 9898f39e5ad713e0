"""Tag of the prices that a run is charged."""

from __future__ import annotations

from mlflow import MlflowClient

from flows.monitoring.run_tags import PRICES_TAG, note_prices
from tasks.training.tracking.metrics import MetricsLog


def test_a_run_with_several_prices_has_the_digest_of_none(mlflow_uri: str) -> None:
    """A recorded cost counts for an estimate only if all of it has the same prices."""
    client = MlflowClient(mlflow_uri)
    log = MetricsLog(client, client.create_run("0").info.run_id)
    tags: list[str] = []
    for digest in ("cheap", "cheap", "expensive", "cheap"):  # each start of a run
        note_prices(log, digest)
        log.flush()
        tags.append(client.get_run(log.run_id).data.tags[PRICES_TAG])
    assert tags == ["cheap", "cheap", "several", "several"]

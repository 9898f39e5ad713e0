"""The one MLflow run context: found or created, and terminated with the right status."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from prefect.exceptions import Pause, TerminationSignal

from blocks import MLflowTracking
from blocks.errors import ServiceError, StorageError
from flows.monitoring.interrupts import RunCancelled
from flows.runs.tracking.mlflow_run import open_mlflow_run
from tasks.reports.summary import STOPPED_TAG
from tasks.training.tracking.metrics import MetricsLog


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> MLflowTracking:
    folder: Path = tmp_path_factory.mktemp("mlflow-run")
    return MLflowTracking(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", experiment="contexts")


def status_of(tracking: MLflowTracking, run_id: str) -> str:
    return MlflowClient(tracking.resolved_uri).get_run(run_id).info.status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "KILLED"),
        (TerminationSignal(signal=15), "KILLED"),
        (RunCancelled("cancelled"), "KILLED"),
        (Pause(), "KILLED"),
        (ValueError("no data"), "FAILED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_an_error_ends_the_run_with_its_status_and_keeps_its_metrics(
    tracking: MLflowTracking, error: BaseException, status: str
):
    run_ids: list[str] = []

    def fail() -> None:
        with open_mlflow_run(tracking, "ends", type(error).__name__, params={}, tags={}) as log:
            run_ids.append(log.run_id)
            assert status_of(tracking, log.run_id) == "RUNNING"
            log.log(0, {"loss/total": 1.5})
            raise error

    with pytest.raises(type(error)):
        fail()
    (run_id,) = run_ids
    assert status_of(tracking, run_id) == status
    tags = MlflowClient(tracking.resolved_uri).get_run(run_id).data.tags
    reasons = {Pause: "The flow run was suspended in Prefect; Resume continues it.", ValueError: "no data"}
    assert tags.get(STOPPED_TAG) == reasons.get(type(error))
    history = MlflowClient(tracking.resolved_uri).get_metric_history(run_id, "loss/total")
    assert [point.value for point in history] == [1.5]


def test_a_success_forgets_the_earlier_failure(tracking: MLflowTracking):
    for error in (ValueError("no data"), None):
        with suppress(ValueError), open_mlflow_run(tracking, "again", "again", params={}, tags={}) as log:
            if error:
                raise error
    run = MlflowClient(tracking.resolved_uri).get_run(log.run_id)
    assert (run.info.status, run.data.tags.get(STOPPED_TAG)) == ("FINISHED", None)


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_process_that_was_frozen_at_its_end_does_not_change_the_status_of_its_successor(
    tracking: MLflowTracking, ends_first: bool
):
    """Its last check of the directory was before the freeze, its last request comes after it."""
    record = f"frozen-{ends_first}"

    def open_run() -> AbstractContextManager[MetricsLog]:
        return open_mlflow_run(tracking, record, record, params={}, tags={})

    frozen, successor = open_run(), open_run()
    log = frozen.__enter__()
    assert successor.__enter__().run_id == log.run_id
    if ends_first:
        successor.__exit__(None, None, None)
    error = ValueError("the lease was lost")
    frozen.__exit__(type(error), error, None)
    assert status_of(tracking, log.run_id) == ("FINISHED" if ends_first else "RUNNING")
    if not ends_first:
        successor.__exit__(None, None, None)
        assert status_of(tracking, log.run_id) == "FINISHED"


def test_a_later_start_finds_the_run_and_keeps_its_params(tracking: MLflowTracking):
    with open_mlflow_run(tracking, "again", "record-again", params={"lr": 1}, tags={"start": "1"}) as first:
        pass
    assert status_of(tracking, first.run_id) == "FINISHED"
    with open_mlflow_run(tracking, "again", "record-again", params={"lr": 2}, tags={"start": "2"}) as second:
        pass
    run = MlflowClient(tracking.resolved_uri).get_run(second.run_id)
    assert second.run_id == first.run_id
    assert (run.data.params, run.data.tags["start"]) == ({"lr": "1"}, "2")


def test_a_known_run_is_preferred_unless_the_store_lacks_it(tracking: MLflowTracking):
    with open_mlflow_run(tracking, "known", "record-known", params={}, tags={}) as known:
        pass
    with open_mlflow_run(tracking, "known", "other", params={}, tags={}, run_id=known.run_id) as log:
        assert log.run_id == known.run_id
    with open_mlflow_run(tracking, "known", "other", params={}, tags={}, run_id="0" * 32) as log:
        assert log.run_id != known.run_id


def test_an_error_of_the_store_does_not_start_a_second_run(tracking: MLflowTracking, monkeypatch: pytest.MonkeyPatch):
    with open_mlflow_run(tracking, "lost", "lost", params={}, tags={}) as log:
        pass

    def fail(_: MlflowClient, run_id: str) -> Run:
        raise MlflowException(f"the database is locked while run {run_id} is read")  # INTERNAL_ERROR

    monkeypatch.setattr(MlflowClient, "get_run", fail)
    again = open_mlflow_run(tracking, "lost", "other", params={}, tags={}, run_id=log.run_id)
    with pytest.raises(ServiceError, match="the database is locked"), again:
        raise AssertionError("the run is not opened")


def test_names_that_mlflow_rejects_are_escaped(tracking: MLflowTracking):
    params, tags = {"rewards.pass@1.weight": 2}, {"acc (%)": "x"}
    with open_mlflow_run(tracking, "names", "names", params=params, tags=tags) as log:
        pass
    data = MlflowClient(tracking.resolved_uri).get_run(log.run_id).data
    assert data.params == {"rewards.pass-x40-1.weight": "2"}
    assert data.tags["acc -x28--x25--x29-"] == "x"


def test_a_full_disk_keeps_the_reason_of_the_failure(tracking: MLflowTracking, monkeypatch: pytest.MonkeyPatch):
    """The metrics that wait to be written cannot be, but the tag can."""

    def fail(_: MetricsLog) -> None:
        raise StorageError("no space left")

    with suppress(ValueError), open_mlflow_run(tracking, "full", "full", params={}, tags={}) as log:
        monkeypatch.setattr(MetricsLog, "flush", fail)
        raise ValueError("no data")
    assert MlflowClient(tracking.resolved_uri).get_run(log.run_id).data.tags[STOPPED_TAG] == "no data"


def test_a_deleted_run_is_not_resumed_until_it_is_restored(tracking: MLflowTracking):
    with open_mlflow_run(tracking, "deleted", "deleted", params={}, tags={}) as log:
        pass
    client = MlflowClient(tracking.resolved_uri)
    client.delete_run(log.run_id)
    again = partial(open_mlflow_run, tracking, "deleted", "deleted", params={}, tags={}, run_id=log.run_id)
    with (
        pytest.raises(ServiceError, match=f"is deleted: restore it .`mlflow runs restore --run-id {log.run_id}`"),
        again(),
    ):
        pass
    client.restore_run(log.run_id)
    with again() as restored:
        assert restored.run_id == log.run_id

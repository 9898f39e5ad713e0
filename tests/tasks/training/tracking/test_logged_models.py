"""Logged models of checkpoints on a real tracking store: the metrics of their step, whichever process logged them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow_store import new_store

from tasks.training.tracking.logged_models import delete_model, link_metrics, log_model
from tasks.training.tracking.metrics import MetricsLog

REPEATED = {"loss/total": 1.0, "test/nll": 3.0, "test/acc": 0.5, "time/step": 0.75}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return MlflowClient(new_store(tmp_path_factory.mktemp("store")))


@pytest.fixture
def run_id(client: MlflowClient, tmp_path: Path) -> str:
    experiment = client.create_experiment(str(tmp_path))
    return client.create_run(experiment).info.run_id


def linked(client: MlflowClient, model_id: str) -> dict[str, float]:
    return {metric.key: metric.value for metric in client.get_logged_model(model_id).metrics or ()}


def num_points(client: MlflowClient, run_id: str, key: str) -> int:
    return len(client.get_metric_history(run_id, key))


def test_metrics_are_linked_whether_they_come_before_or_after_the_model(client: MlflowClient, run_id: str) -> None:
    log = MetricsLog(client, run_id)
    log.log(3, {"loss": 3.0})
    log.expect_model(4)
    log.log(4, {"loss": 4.0, "test/nll": 0.5})
    before = log_model(log, "checkpoint-000004", 4, {"tinker.state_path": "tinker://a"})
    after = log_model(log, "checkpoint-000005", 5, {})
    log.log(5, {"loss": 5.0})
    log.flush()
    assert linked(client, before) == {"loss": 4.0, "test/nll": 0.5}
    assert linked(client, after) == {"loss": 5.0}
    assert num_points(client, run_id, "loss") == 3
    model = client.get_logged_model(before)
    assert (model.source_run_id, str(model.status)) == (run_id, "READY")
    assert model.tags["tinker.state_path"] == "tinker://a"


def test_resumed_run_links_metrics_that_an_earlier_process_did_not_link(client: MlflowClient, run_id: str) -> None:
    killed = MetricsLog(client, run_id)
    killed.expect_model(4)
    model_id = log_model(killed, "checkpoint-000004", 4, {})  # waits for the metrics of step 4
    other = MetricsLog(client, run_id)  # the killed process has logged them, but not for the model
    other.log(4, {"loss": 4.0})
    other.flush()
    assert linked(client, model_id) == {}

    resumed = MetricsLog(client, run_id)
    link_metrics(resumed, 4, model_id)
    assert linked(client, model_id) == {"loss": 4.0}
    link_metrics(resumed, 4, model_id)  # nothing is left to do
    assert num_points(client, run_id, "loss") == 1

    next_id = log_model(killed, "checkpoint-000006", 6, {})
    link_metrics(resumed, 6, next_id)  # the step is not logged yet
    resumed.log(6, {"loss": 6.0})
    resumed.flush()
    assert linked(client, next_id) == {"loss": 6.0}


def test_linking_many_metrics_twice_repeats_none(client: MlflowClient, run_id: str) -> None:
    """MLflow rejects a write of more than 100 points if the model has one of them."""
    metrics = {f"metric_{number:03}": float(number) for number in range(250)}
    killed = MetricsLog(client, run_id)
    killed.log(4, metrics)
    killed.flush()
    model_id = log_model(killed, "checkpoint-000004", 4, {})
    link_metrics(killed, 4, model_id)
    resumed = MetricsLog(client, run_id)
    link_metrics(resumed, 4, model_id)
    assert linked(client, model_id) == metrics
    assert num_points(client, run_id, "metric_000") == 1


@pytest.mark.parametrize("starts_over", [True, False])
@pytest.mark.parametrize("links_first", [True, False])
def test_a_repeated_step_links_one_value_of_each_metric(
    client: MlflowClient, run_id: str, starts_over: bool, links_first: bool
) -> None:
    """An earlier process has logged step 4; this one links its model before or after it logs the step again."""
    killed = MetricsLog(client, run_id)
    killed.log(4, {"loss/total": 1.0, "test/nll": 2.0, "time/step": 0.5})
    killed.flush()
    log = MetricsLog(client, run_id)
    log.starts_over = starts_over
    model = client.create_logged_model(client.get_run(run_id).info.experiment_id, "model", run_id)
    log.expect_model(4)
    actions = [lambda: link_metrics(log, 4, model.model_id), lambda: log.log(4, REPEATED)]
    for action in actions if links_first else reversed(actions):
        action()
    log.flush()
    expected = REPEATED | {"time/step": 0.5} | ({} if starts_over else {"test/nll": 2.0})
    assert linked(client, model.model_id) == expected
    assert [num_points(client, run_id, key) for key in ("loss/total", "test/acc", "time/step")] == [1, 1, 1]


def test_deleted_model_is_deleted_once(client: MlflowClient, run_id: str) -> None:
    model_id = log_model(MetricsLog(client, run_id), "checkpoint-000002", 2, {})
    delete_model(client, model_id)
    delete_model(client, model_id)
    with pytest.raises(MlflowException):
        client.get_logged_model(model_id)


def models_of(client: MlflowClient, run_id: str) -> list[str]:
    run = client.get_run(run_id)
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
    return [model.model_id for model in models]


@pytest.mark.parametrize("killed_after", ["create_logged_model", "log_outputs", "finalize_logged_model", "log_batch"])
def test_checkpoint_adopts_the_model_of_a_killed_process(
    client: MlflowClient, run_id: str, killed_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process ends right after one of its requests; the record of the checkpoint is not written."""

    class KilledError(BaseException):
        pass

    killed = MetricsLog(client, run_id)
    killed.log(4, {"loss": 4.0})
    killed.flush()
    request = getattr(MlflowClient, killed_after)

    def request_and_die(*args: object, **kwargs: object) -> None:
        request(*args, **kwargs)
        raise KilledError

    monkeypatch.setattr(MlflowClient, killed_after, request_and_die)
    with pytest.raises(KilledError):
        log_model(killed, "checkpoint-000004", 4, {"tinker.state_path": "tinker://a"})
    monkeypatch.undo()
    (orphan,) = models_of(client, run_id)

    resumed = MetricsLog(client, run_id)
    assert log_model(resumed, "checkpoint-000004", 4, {"tinker.state_path": "tinker://b"}) == orphan
    assert models_of(client, run_id) == [orphan]
    model = client.get_logged_model(orphan)
    assert (str(model.status), model.tags["tinker.state_path"]) == ("READY", "tinker://b")
    assert linked(client, orphan) == {"loss": 4.0}
    assert [output.model_id for output in client.get_run(run_id).outputs.model_outputs] == [orphan]


def test_recorded_model_and_models_of_other_steps_are_not_adopted(client: MlflowClient, run_id: str) -> None:
    log = MetricsLog(client, run_id)
    first = log_model(log, "final", 4, {})
    assert log_model(log, "final", 4, {}, recorded={first}) != first  # a run that has rolled back saves the step again
    assert log_model(log, "final", 6, {}) != first
    assert len(models_of(client, run_id)) == 3


@pytest.mark.parametrize("name", ["llama-3.1", "50%", "a's", 'a "b"', "schema.model"])
def test_names_of_the_registry_become_names_of_logged_models(client: MlflowClient, run_id: str, name: str) -> None:
    client.create_registered_model(name)
    model = client.get_logged_model(log_model(MetricsLog(client, run_id), name, 2, {}))
    assert model.name == name.translate(str.maketrans(dict.fromkeys("/:.%\"'", "-")))

"""Checkpoints of a run: retention, the best checkpoint, the model registry, and forks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tinker
from engine_process import API_KEY, EngineProcess
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow_store import new_store
from saved_weights import saved_weights
from sft_config import sft_fields
from tinker import types

from blocks.errors import ConfigError, ServiceError
from flows.config.loader import load_config, validate_fields
from flows.config.train import SftConfig
from flows.runs.checkpoints import checkpoint_manager
from flows.runs.result import TrainResult
from flows.sft import sft
from tasks.common.task import step_task
from tasks.training.tracking.metrics import STEP_KEY, metric_values

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")
MODEL = "gsm8k-tiny"


@pytest.fixture(scope="module")
def api_key() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", API_KEY)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def fields(folder: Path, mlflow_uri: str, engine_url: str) -> dict[str, Any]:
    """Return a run with learned term weights, so that resuming needs the objective's state."""
    objective = {"regularizers": [{"name": "logic"}], "balance": {"method": "gradnorm"}}
    changes = {"objective": objective, "num_steps": 8, "checkpoint_every": 2, "eval_every": 2}
    return sft_fields(folder, "parent", mlflow_uri, engine_url) | changes


@pytest.fixture(scope="module")
def parent(api_key: None, prefect_server: str, fields: dict[str, Any]) -> TrainResult:
    """Run with checkpoints at steps 2, 4, 6 and 8."""
    keep = {"keep_last": 3, "keep_best": {"metric": "test/nll"}, "ttl_seconds": 7200, "register_as": MODEL}
    return sft(SftConfig.model_validate(fields | keep))


def train(fields: dict[str, Any], **changes: object) -> TrainResult:
    return sft(SftConfig.model_validate(fields | changes))


def lines(result: TrainResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.directory) / "checkpoints.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rest(engine_url: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=engine_url, api_key=API_KEY)


def on_service(rest: tinker.RestClient) -> dict[str, types.Checkpoint]:
    return {
        checkpoint.tinker_path: checkpoint for checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints
    }


def test_newest_best_and_final_checkpoints_are_kept(
    parent: TrainResult, rest: tinker.RestClient, mlflow_uri: str
) -> None:
    saved = {line["step"]: line["state_path"] for line in lines(parent) if "state_path" in line}
    assert list(saved) == [2, 4, 6, 8]
    points = MlflowClient(mlflow_uri).get_metric_history(parent.mlflow_run_id, "test/nll")
    nll = {point.step: point.value for point in points if point.step in saved}
    best = min(nll, key=lambda step: nll[step])
    noted = [line for line in lines(parent) if "best" in line][-1]
    assert (noted["best"], noted["best_step"], noted["value"]) == (saved[best], best, nll[best])

    remaining = on_service(rest)
    expected = {4, 6, 8, best}
    assert {step for step, path in saved.items() if path in remaining} == expected
    assert {step for step in expected if remaining[saved[step]].expires_at is None} == {8, best}
    assert [line["dropped"] for line in lines(parent) if "dropped" in line] == [saved[2]] * (best != 2)


def test_checkpoints_are_logged_models_with_the_metrics_of_their_step(parent: TrainResult, mlflow_uri: str) -> None:
    client = MlflowClient(mlflow_uri)
    run = client.get_run(parent.mlflow_run_id)
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{parent.mlflow_run_id}'")
    dropped = {line["dropped"] for line in lines(parent) if "dropped" in line}
    kept = {line["mlflow_model_id"]: line for line in lines(parent) if line.get("state_path", "") not in {"", *dropped}}
    assert {model.model_id for model in models} == kept.keys()
    keys = [key for key in run.data.metrics if key != STEP_KEY]
    points = [point for key in keys for point in client.get_metric_history(parent.mlflow_run_id, key)]
    for model in models:
        line = kept[model.model_id]
        assert (model.name, model.status) == (f"checkpoint-{line['name']}", "READY")
        assert model.tags["tinker.state_path"] == line["state_path"]
        assert model.params == run.data.params
        at_step = {point.key: point.value for point in points if point.step == line["step"]}
        assert {metric.key: metric.value for metric in model.metrics} == at_step
        assert "test/nll" in at_step
    assert len(points) == len({(point.key, point.step) for point in points})
    outputs = {output.model_id: output.step for output in run.outputs.model_outputs}
    assert kept.keys() <= outputs.keys()
    assert all(outputs[model_id] == line["step"] for model_id, line in kept.items())


def test_best_checkpoint_is_registered_once(
    parent: TrainResult, fields: dict[str, Any], mlflow_uri: str, engine_url: str
) -> None:
    """A run that was killed after its final checkpoint, and before it recorded the best one, records it now."""
    client = MlflowClient(mlflow_uri)
    worse = next(line for line in reversed(lines(parent)) if line.get("step") == 6)["state_path"]
    others = [line for line in lines(parent) if "best" not in line]
    stale = [*others, {"name": "best", "best": worse, "best_step": 6, "metric": "test/nll", "value": 99.0}]
    (Path(parent.directory) / "checkpoints.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in stale))
    again = train(fields, keep_best={"metric": "test/nll"}, register_as=MODEL)
    assert again.resumed_from == 8
    (version,) = client.search_model_versions(f"name = '{MODEL}'")
    best = [line for line in lines(parent) if "best" in line][-1]
    alias = "final" if best["best_step"] == 8 else "best"
    assert client.get_model_version_by_alias(MODEL, alias).version == version.version
    assert version.tags["tinker.state_path"] == best["best"]
    assert version.tags["tinker_flows.run_name"] == "parent"
    assert version.run_id == parent.mlflow_run_id

    (line,) = [line for line in lines(parent) if line.get("state_path") == best["best"]]
    assert version.tags["tinker_flows.model_id"] == line["mlflow_model_id"]
    model = client.get_logged_model(version.tags["tinker_flows.model_id"])
    assert {metric.key: metric.value for metric in model.metrics}["test/nll"] == best["value"]
    for key in client.get_run(parent.mlflow_run_id).data.metrics:
        steps = [point.step for point in client.get_metric_history(parent.mlflow_run_id, key)]
        assert len(steps) == len(set(steps)), key

    with tinker.ServiceClient(base_url=engine_url) as service:
        sampler = service.create_sampling_client(model_path=version.source).result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        response = sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)).result()
    assert response.sequences[0].tokens


def test_a_finished_run_applies_a_new_keep_best(parent: TrainResult, fields: dict[str, Any], mlflow_uri: str) -> None:
    unmeasured = train(fields, keep_best={"metric": "test/nil"}, register_as="gsm8k-unmeasured")
    assert any("No checkpoint has a value of keep_best.metric, test/nil" in text for text in unmeasured.warnings)
    (version,) = MlflowClient(mlflow_uri).search_model_versions("name = 'gsm8k-unmeasured'")
    assert version.tags["tinker.state_path"] == parent.state_path
    again = train(fields, keep_best={"metric": "test/nll", "mode": "max"}, register_as="gsm8k-worst")
    assert not any("keep_best" in text for text in again.warnings)
    values = metric_values(MlflowClient(mlflow_uri), again.mlflow_run_id, "test/nll")
    dropped = {line["dropped"] for line in lines(parent) if "dropped" in line}
    saved = {
        line["step"]: line["state_path"] for line in lines(parent) if line.get("state_path", "") not in {"", *dropped}
    }
    worst = max(saved, key=lambda step: values[step])
    (version,) = MlflowClient(mlflow_uri).search_model_versions("name = 'gsm8k-worst'")
    assert version.tags["tinker.state_path"] == saved[worst]
    assert [line for line in lines(parent) if "best" in line][-1]["best"] == saved[worst]


def test_nothing_is_registered_if_the_best_checkpoint_is_unknown(
    parent: TrainResult, fields: dict[str, Any], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @step_task(name="keep")
    def fail(*_: object) -> None:
        raise MlflowException("the store does not respond")

    monkeypatch.setattr(checkpoint_manager, "keep_checkpoints", fail)
    with pytest.raises(ServiceError, match=r"MLflow database .* could not be used \(the store does not respond\)"):
        train(fields, keep_best={"metric": "test/nll"}, register_as="unknown")
    assert not MlflowClient(mlflow_uri).search_model_versions("name = 'unknown'")


def test_another_tracking_store_has_the_earlier_metrics(fields: dict[str, Any], tmp_path: Path) -> None:
    """The best checkpoint and the baseline of a resumed run are those of an uninterrupted one."""
    changes = {
        "run_name": "moved",
        "keep_last": 2,
        "keep_best": {"metric": "test/nll", "mode": "max"},
        "register_as": "moved",
        "promote_if": "test/nll < 2 * baseline",
    }
    before = train(fields, **changes)
    path = Path(before.directory) / "checkpoints.jsonl"
    whole = lines(before)
    best = [line for line in whole if "best" in line][-1]
    assert best["best_step"] < 6
    (end,) = [number for number, line in enumerate(whole) if line.get("step") == 8]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in whole[:end]))  # as if killed after step 6
    for resumed_from in (6, 8):
        folder = tmp_path / f"tracking-{resumed_from}"
        folder.mkdir()
        again = train(fields, **changes, tracking=new_store(folder))
        assert again.resumed_from == resumed_from
        assert again.not_promoted == ""
        assert [line for line in lines(again) if "best" in line][-1] == best
        client = MlflowClient(again.tracking_uri)
        for key in ("test/nll", "loss/total", "optim/lr"):
            history = {point.step: point.value for point in client.get_metric_history(again.mlflow_run_id, key)}
            assert history == metric_values(MlflowClient(before.tracking_uri), before.mlflow_run_id, key)
        (version,) = client.search_model_versions("name = 'moved'")
        assert version.tags["tinker.state_path"] == best["best"]
        assert any("goes on in another MLflow run" in warning for warning in again.warnings)


def test_fork_continues_its_parent_and_records_it(
    parent: TrainResult, fields: dict[str, Any], engine: EngineProcess, mlflow_uri: str
) -> None:
    """An unchanged fork ends with its parent's weights bit for bit; then it resumes from its own checkpoints."""
    fork = train(fields, run_name="fork", resume="parent@4")
    assert saved_weights(engine.state, fork.state_path) == saved_weights(engine.state, parent.state_path)
    client = MlflowClient(mlflow_uri)
    tags = client.get_run(fork.mlflow_run_id).data.tags
    assert tags["tinker_flows.parent.mlflow_run_id"] == parent.mlflow_run_id != fork.mlflow_run_id
    assert tags["tinker_flows.parent.step"] == "4"
    assert sorted(p.step for p in client.get_metric_history(fork.mlflow_run_id, "loss/total")) == [4, 5, 6, 7]
    first, *own = lines(fork)
    assert first["parent"]["run_name"] == "parent"
    assert [line["step"] for line in own] == [6, 8]

    assert train(fields, run_name="fork", resume="parent@4").resumed_from == 8
    assert train(fields, run_name="fork").resumed_from == 8
    with pytest.raises(ConfigError, match=r"'fork' started from parent@4 .* but resume is 'parent@6': choose another"):
        train(fields, run_name="fork", resume="parent@6")
    with pytest.raises(ConfigError, match="'parent' is no fork"):
        train(fields, resume="fork")


@pytest.mark.slow
def test_fork_with_other_parameters_from_the_best_checkpoint_and_from_a_path(
    parent: TrainResult, fields: dict[str, Any], engine: EngineProcess
) -> None:
    best = [line for line in lines(parent) if "best" in line][-1]
    num_steps = best["best_step"] + 1
    longer = train(fields, run_name="longer", resume="parent@best", num_steps=num_steps, learning_rate=1e-3)
    assert lines(longer)[0]["state_path"] == best["best"]
    assert lines(longer)[0]["parent"]["step"] == best["best_step"]
    assert longer.num_steps == num_steps
    anew = train(fields, run_name="anew", resume=parent.state_path, num_steps=1, eval_every=0)
    assert [line["step"] for line in lines(anew)] == [0, 1]
    assert saved_weights(engine.state, anew.state_path) != saved_weights(engine.state, parent.state_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"resume": "parent@3"}, r"'parent' has no checkpoint at step 3; it has checkpoints at .*4, 6, 8: use one"),
        ({"resume": "nobody"}, r"'nobody' has no checkpoint in .*nobody: use another run"),
        ({"resume": "bad"}, r"'bad' is this run itself"),
        ({"resume": "parent@final"}, r"at step 8, but this run ends at step 8: raise num_steps"),
        ({"resume": "parent@4", "lora_rank": 8}, r"has rank 4, but lora_rank is 8: set lora_rank to 4"),
        ({"resume": "parent@4", "train_mlp": False}, r"has train_mlp True, but train_mlp is False: set it to True"),
        ({"resume": "tinker://gone/weights/x"}, r"none of the 1 checkpoints that 'bad' can start from"),
    ],
)
def test_invalid_forks(
    parent: TrainResult, fields: dict[str, Any], folder: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises((ConfigError, ServiceError), match=expected):
        train(fields, run_name="bad", **changes)
    assert not (folder / "runs" / "bad" / "checkpoints.jsonl").exists()
    assert not (folder / "runs" / "nobody").exists()


@pytest.mark.parametrize("value", ["", "auto@", "a b", "parent@best@4", "tinker://", "../parent"])
def test_invalid_resume_is_a_config_error(fields: dict[str, Any], tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"resume": value}))
    with pytest.raises(ConfigError, match=r"'resume' is .*use auto, never, the name of a run"):
        load_config(SftConfig, path, [])


def test_deleted_and_expired_checkpoints_are_skipped(
    fields: dict[str, Any], rest: tinker.RestClient, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(fields, run_name="gone", eval_every=0)
    saved = Path(whole.directory) / "checkpoints.jsonl"
    second, fourth, sixth, _ = lines(whole)
    saved.write_text("".join(json.dumps(line) + "\n" for line in (second, fourth, sixth)))
    rest.delete_checkpoint_from_tinker_path(sixth["state_path"]).result()
    rest.set_checkpoint_ttl_from_tinker_path(fourth["state_path"], 1).result()
    time.sleep(1.1)
    again = train(fields, run_name="gone", eval_every=0)
    assert again.resumed_from == 2
    assert again.mlflow_run_id == whole.mlflow_run_id
    assert again.metrics["loss/total"] == whole.metrics["loss/total"]
    output = capfd.readouterr().err
    assert "There is no checkpoint" in output
    assert "Trying the previous checkpoint" in output
    assert "expired on" in output

    for line in lines(again):
        if line["state_path"] in on_service(rest):
            rest.delete_checkpoint_from_tinker_path(line["state_path"]).result()
    with pytest.raises(
        ServiceError, match=r"The service could load none of the 6 checkpoints that 'gone' can start from"
    ):
        train(fields, run_name="gone", eval_every=0)


def test_only_the_chosen_layers_have_an_adapter(fields: dict[str, Any], engine: EngineProcess) -> None:
    result = train(fields, run_name="attention", num_steps=1, eval_every=0, train_mlp=False, train_unembed=False)
    names = [name for name in saved_weights(engine.state, result.state_path) if "adapter" in name]
    assert names
    assert all("self_attn" in name for name in names)
    with pytest.raises(ConfigError, match="train_attn, train_mlp and train_unembed are all false"):
        validate_fields(SftConfig, fields | dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False))

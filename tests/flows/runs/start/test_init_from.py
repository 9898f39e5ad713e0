"""Runs that start from given weights with a fresh optimizer, compared with tinker-cookbook's `load_checkpoint_path`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from cookbook_sft import train_with_cookbook, write_builder_params
from engine_process import API_KEY, EngineProcess
from mlflow import MlflowClient
from saved_weights import saved_weights
from sft_config import sft_fields

from blocks import TinkerService
from blocks.errors import ConfigError, ServiceError
from flows.config.train import SftConfig
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server")
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)


@pytest.fixture
def builder_params(tmp_path: Path) -> dict[str, Any]:
    return write_builder_params(tmp_path, NUM_STEPS)


@pytest.fixture
def fields(tmp_path: Path, mlflow_uri: str, engine_url: str, builder_params: dict[str, Any]) -> dict[str, Any]:
    data = {"builder": "examples.gsm8k:Gsm8kBuilder", "params": builder_params}
    changes = {"num_steps": None, "checkpoint_every": 2, "eval_every": 0}
    return sft_fields(tmp_path, "warm", mlflow_uri, engine_url) | changes | {"data": data, "objective": {}}


def train(fields: dict[str, Any], run_name: str, **changes: Any) -> TrainResult:
    return sft(SftConfig.model_validate(fields | {"run_name": run_name} | changes))


def losses(result: TrainResult, tracking: str) -> list[float]:
    points = MlflowClient(tracking).get_metric_history(result.mlflow_run_id, "train_mean_nll")
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def cookbook_losses(directory: Path, builder_params: dict[str, Any], load_checkpoint_path: str) -> list[float]:
    train_with_cookbook(directory, builder_params, load_checkpoint_path=load_checkpoint_path)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["train_mean_nll"] for line in lines if "train_mean_nll" in line]


def lines(folder: Path, run_name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / run_name / "checkpoints.jsonl").read_text().splitlines()]


def test_losses_equal_the_cookbooks(
    tmp_path: Path, fields: dict[str, Any], builder_params: dict[str, Any], mlflow_uri: str
) -> None:
    """A forked run differs from them, because it also loads the moments of the optimizer."""
    start = train(fields, "warm").state_path
    fresh = losses(train(fields, "fresh", init_from=start), mlflow_uri)
    assert len(fresh) == NUM_STEPS
    assert fresh == pytest.approx(cookbook_losses(tmp_path / "cookbook", builder_params, start), abs=1e-6)
    assert losses(train(fields, "forked", resume=start), mlflow_uri)[1] != pytest.approx(fresh[1], abs=1e-4)


def test_run_name_sampler_weights_and_restart(tmp_path: Path, fields: dict[str, Any], engine: EngineProcess) -> None:
    """All names of the same weights train the same, also after a crash before the first checkpoint."""
    warm = train(fields, "warm")
    by_name = train(fields, "by-name", init_from="warm@final")
    origin, *own = lines(tmp_path, "by-name")
    assert (origin["step"], origin["parent"]["run_name"], origin["parent"]["step"]) == (0, "warm", NUM_STEPS)
    assert [line["step"] for line in own] == [2, 3]

    sampler_path = lines(tmp_path, "warm")[-1]["sampler_path"]
    assert "/sampler_weights/" in sampler_path
    sampled = train(fields, "sampled", init_from=sampler_path)
    assert saved_weights(engine.state, sampled.state_path) == saved_weights(engine.state, by_name.state_path)

    (tmp_path / "runs" / "by-name" / "checkpoints.jsonl").write_text(json.dumps(origin) + "\n")
    again = train(fields, "by-name", init_from="warm@final")
    assert again.resumed_from == 0
    assert saved_weights(engine.state, again.state_path) == saved_weights(engine.state, by_name.state_path)

    with pytest.raises(ConfigError, match=r"rank 4, but lora_rank is 8: set lora_rank to 4"):
        train(fields, "wide", init_from=warm.state_path, lora_rank=8)
    with pytest.raises(ConfigError, match=r"an adapter of .*tiny.*, but model is smollm2-135m: set model to"):
        train(fields, "other-model", init_from="warm", model="smollm2-135m")
    with pytest.raises(ConfigError, match="was started with another init_from"):
        train(fields, "by-name", init_from="warm@2")
    with pytest.raises(ValueError, match="both name the weights to start from: remove resume"):
        SftConfig.model_validate(fields | {"init_from": "warm", "resume": "warm@2"})


def test_run_name_means_its_newest_weights(
    tmp_path: Path, fields: dict[str, Any], engine: EngineProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sampler weights that are newer than the last state are preferred, unless the service no longer has them."""
    train(fields, "mixed", checkpoint_every=1, checkpoint_kind="both")
    records = lines(tmp_path, "mixed")
    for record in records[1:]:
        del record["state_path"]  # as after a stop at step 1 and a resume with checkpoint_kind: sampler
    file = tmp_path / "runs" / "mixed" / "checkpoints.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    newest = train(fields, "newest", init_from="mixed")
    parent = lines(tmp_path, "newest")[0]["parent"]
    assert (parent["step"], parent["state_path"]) == (NUM_STEPS, records[-1]["sampler_path"])
    assert f"starts from {records[-1]['sampler_path']}, step {NUM_STEPS} of the run mixed" in capfd.readouterr().err
    by_path = train(fields, "by-path", init_from=records[-1]["sampler_path"])
    assert saved_weights(engine.state, newest.state_path) == saved_weights(engine.state, by_path.state_path)

    rest = tinker.RestClient(base_url=engine.url, api_key=API_KEY)
    for record in records[1:]:
        rest.delete_checkpoint_from_tinker_path(record["sampler_path"]).result()
    train(fields, "older", init_from="mixed")
    parent = lines(tmp_path, "older")[0]["parent"]
    assert (parent["step"], parent["state_path"]) == (1, records[0]["state_path"])


def test_the_best_weights_of_a_run(tmp_path: Path, fields: dict[str, Any], engine: EngineProcess) -> None:
    """The NLL falls, so its maximum is at the first checkpoint, which is neither the newest nor the final one."""
    best = {"keep_best": {"metric": "train_mean_nll", "mode": "max"}, "checkpoint_every": 1}
    train(fields, "warm", **best)
    records = lines(tmp_path, "warm")
    first = train(fields, "first", init_from="warm@best")
    parent = lines(tmp_path, "first")[0]["parent"]
    assert (parent["run_name"], parent["step"], parent["state_path"]) == ("warm", 1, records[0]["state_path"])
    by_path = train(fields, "by-path", init_from=records[0]["state_path"])
    assert saved_weights(engine.state, first.state_path) == saved_weights(engine.state, by_path.state_path)


def test_a_service_that_trains_no_sampler_weights(
    tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The local engine trains them, so its client raises the error of a service that refuses."""
    train(fields, "warm", checkpoint_every=1, checkpoint_kind="both")
    records = lines(tmp_path, "warm")
    for record in records[1:]:
        del record["state_path"]
    file = tmp_path / "runs" / "warm" / "checkpoints.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    load = tinker.ServiceClient.create_training_client_from_state

    def refuse(service: tinker.ServiceClient, path: str, *args: Any, **options: Any) -> Any:
        if "/sampler_weights/" in path:
            response = httpx.Response(400, request=httpx.Request("POST", "http://service"))
            raise tinker.BadRequestError("sampler weights cannot be trained", response=response, body=None)
        return load(service, path, *args, **options)

    monkeypatch.setattr(tinker.ServiceClient, "create_training_client_from_state", refuse)
    train(fields, "older", init_from="warm")
    assert lines(tmp_path, "older")[0]["parent"]["state_path"] == records[0]["state_path"]
    assert "Trying the previous checkpoint." in capfd.readouterr().err
    with pytest.raises(ServiceError, match=r"could load none of .* 'sampled' .*sampler weights cannot be trained"):
        train(fields, "sampled", init_from=records[-1]["sampler_path"])


@pytest.mark.parametrize("field", ["init_from", "resume"])
def test_weights_of_another_model(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    with tinker.ServiceClient() as service:
        path = service.create_lora_training_client("tiny", rank=4).result().save_state("start").result().path
    # The shared engine has one model.
    monkeypatch.setattr(TinkerService, "models", lambda _: ["tiny", "smollm2-135m"])
    with pytest.raises(ConfigError, match=rf"{field} is .*, an adapter of tiny, but model is smollm2-135m: set model"):
        train(fields, f"other-{field}", model="smollm2-135m", **{field: path})

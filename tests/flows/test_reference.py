"""Terms that measure from a reference: the base model or a checkpoint, asked once for each datum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from sft_config import sft_fields

from blocks import RunStorage
from blocks.errors import ServiceError
from flows.result import TrainResult
from flows.sft import SftConfig, sft
from tasks.checkpoint import read_records
from tasks.reference import REFERENCE_NAME

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


def run(folder: Path, name: str, mlflow_uri: str, engine_url: str, **changes: Any) -> TrainResult:
    fields = sft_fields(folder, name, mlflow_uri, engine_url) | {"num_steps": 4, "eval_every": 0, "adam": {"eps": 1e-2}}
    fields["objective"] = {"regularizers": [{"name": "kl", "weight": 0.1}], "backend": "client"}
    return sft(SftConfig.model_validate(fields | changes))


def kl_of(result: TrainResult, mlflow_uri: str) -> list[float]:
    points = MlflowClient(mlflow_uri).get_metric_history(result.mlflow_run_id, "term/kl/value")
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def test_the_base_model_is_asked_once_for_each_datum(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    first = run(tmp_path, "two-passes", mlflow_uri, engine_url, num_steps=2, num_epochs=1)
    directory = RunStorage(url=str(tmp_path / "runs")).run_directory("two-passes")
    kept = directory.read_bytes(REFERENCE_NAME) or b""
    assert kept.count(b"\n") == 1
    distances = kl_of(first, mlflow_uri)
    assert distances[0] == 0
    assert distances[1] > 1e-6

    fused = run(tmp_path, "one-pass", mlflow_uri, engine_url, num_steps=2, objective=one_pass())
    assert kl_of(fused, mlflow_uri) == pytest.approx(distances, abs=1e-6)


def one_pass() -> dict[str, Any]:
    return {"regularizers": [{"name": "kl", "weight": 0.1}], "backend": "server"}


def test_a_checkpoint_is_the_reference(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    run(tmp_path, "teacher", mlflow_uri, engine_url, num_steps=2)
    directory = RunStorage(url=str(tmp_path / "runs")).run_directory("teacher")
    path = read_records(directory).checkpoints[0].state_path
    student = run(tmp_path, "student", mlflow_uri, engine_url, num_steps=2, reference=path, resume=path)
    distances = kl_of(student, mlflow_uri)
    assert distances[0] == 0
    assert distances[1] > 1e-6

    missing = "tinker://00000000-0000-0000-0000-000000000000/weights/none"
    with pytest.raises(ServiceError, match="open the reference tinker://0000"):
        run(tmp_path, "lost", mlflow_uri, engine_url, reference=missing)

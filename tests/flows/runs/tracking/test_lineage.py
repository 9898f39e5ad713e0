"""Datasets, description, source and params of a run in MLflow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.types import Schema

from blocks import MLflowTracking
from flows.config.train import SftConfig
from flows.runs.tracking.lineage import log_datasets
from flows.runs.tracking.mlflow_run import changed_fields_of, open_mlflow_run
from tasks.common.digests import digest_file

ROWS = [{"question": "1 + 1?", "answer": "2", "score": 0.5, "tags": ["sum"]}, {"question": "2 + 2?", "answer": "4"}]


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> MLflowTracking:
    folder: Path = tmp_path_factory.mktemp("lineage")
    return MLflowTracking(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", experiment="lineage")


def config_of(**fields: object) -> SftConfig:
    return SftConfig.model_validate(
        {"run_name": "r", "model": "tiny", "data": {"builder": "a:B", "params": {}}, **fields}
    )


def test_data_files_are_datasets_of_the_run(tracking: MLflowTracking, tmp_path: Path):
    train, test = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for path, rows in ((train, ROWS), (test, ROWS[:1])):
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", "utf-8-sig")
    params = {"path": str(train), "test_path": str(test)}
    config = config_of(data={"builder": "a:B", "params": params})
    digests = {str(train): digest_file(train), str(test): digest_file(test), "a:B": "0123456789abcdef"}
    with open_mlflow_run(tracking, "data", "data", params={}, tags={}) as log:
        for _ in range(2):  # as a run that resumes
            log_datasets(log, config, digests, first_batch="0")
    run_inputs = MlflowClient(tracking.resolved_uri).get_run(log.run_id).inputs
    assert run_inputs is not None
    inputs = run_inputs.dataset_inputs
    found = {entry.dataset.name: entry for entry in inputs}
    assert len(inputs) == len(found) == 2
    for path, context, num_rows in ((train, "training", 2), (test, "evaluation", 1)):
        entry = found[path.name]
        assert [(tag.key, tag.value) for tag in entry.tags] == [("mlflow.data.context", context)]
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(entry.dataset.digest)
        assert json.loads(entry.dataset.source) == {"uri": str(path)}
        assert entry.dataset.profile is not None
        assert entry.dataset.schema is not None
        assert json.loads(entry.dataset.profile) == {"num_rows": num_rows}
        schema = Schema.from_json(json.dumps(json.loads(entry.dataset.schema)["mlflow_colspec"]))
        assert schema.input_names() == ["question", "answer", "score", "tags"]


@pytest.mark.parametrize("content", [b"no JSON", b"\xff\xfe", b""])
def test_a_file_of_another_format_has_no_columns(tracking: MLflowTracking, tmp_path: Path, content: bytes):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    with open_mlflow_run(tracking, "odd", f"odd {content.hex()}", params={}, tags={}) as log:
        log_datasets(log, config_of(data={"builder": "a:B", "params": {"path": str(path)}}), {str(path): "0"}, "")
    inputs = MlflowClient(tracking.resolved_uri).get_run(log.run_id).inputs
    assert inputs is not None
    assert [entry.dataset.schema for entry in inputs.dataset_inputs] == [None]


def test_params_beyond_the_limit_of_mlflow_are_a_digest(tracking: MLflowTracking):
    config = config_of(data={"builder": "a:B", "params": {"text": "x" * 70_000}})
    with open_mlflow_run(tracking, "long", "long", params={}, tags={}) as log:
        log_datasets(log, config, {}, first_batch="1")
    inputs = MlflowClient(tracking.resolved_uri).get_run(log.run_id).inputs
    assert inputs is not None
    assert json.loads(inputs.dataset_inputs[0].dataset.source).keys() == {"data.builder", "digest"}


@pytest.mark.parametrize(
    ("params", "context"),
    [
        ({"latest_path": "FILE"}, "training"),
        ({"retrieval_file": "FILE"}, "training"),
        ({"test_paths": ["other", "FILE"]}, "evaluation"),
        ({"eval_path": "FILE"}, "evaluation"),
    ],
)
def test_the_field_tells_the_use_of_a_file(
    tracking: MLflowTracking, tmp_path: Path, params: dict[str, object], context: str
):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    text = json.dumps(params).replace("FILE", str(path))
    with open_mlflow_run(tracking, "use", text, params={}, tags={}) as log:
        log_datasets(log, config_of(data={"builder": "a:B", "params": json.loads(text)}), {str(path): "0"}, "")
    inputs = MlflowClient(tracking.resolved_uri).get_run(log.run_id).inputs
    assert inputs is not None
    assert inputs.dataset_inputs[0].tags[0].value == context


def test_data_without_a_file_is_identified_by_its_builder_and_first_batch(tracking: MLflowTracking):
    config = config_of(data={"builder": "a:B", "params": {"split": "train"}})
    with open_mlflow_run(tracking, "builder", "builder", params={}, tags={}) as log:
        log_datasets(log, config, {}, first_batch="0a1b2c3d4e5f")
    inputs = MlflowClient(tracking.resolved_uri).get_run(log.run_id).inputs
    assert inputs is not None
    (entry,) = inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("a:B", "0a1b2c3d4e5f")
    assert json.loads(entry.dataset.source) == {"data.builder": "a:B", "data.params.split": "train"}


def test_params_are_the_settings_that_differ_from_the_defaults():
    regularizers = [{"name": "confidence", "weight": 0.25}]
    params = changed_fields_of(config_of(num_steps=7, objective={"regularizers": regularizers}))
    assert params["num_steps"] == 7
    assert params["objective.regularizers.confidence.weight"] == 0.25
    assert params["model"] == "tiny"
    assert not {"eval_every", "budget.usd", "objective.backend", "adam.beta1"} & params.keys()


def test_settings_that_the_report_shows_are_params_even_as_defaults():
    assert {"learning_rate", "lr_schedule", "lora_rank", "seed"} <= changed_fields_of(config_of()).keys()


def test_the_experiment_opens_the_view_of_training_runs(tracking: MLflowTracking):
    client = tracking.get_client()
    experiment = client.get_experiment(tracking.experiment_id(client))
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"

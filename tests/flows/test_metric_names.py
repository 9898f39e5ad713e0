"""Metrics that MLflow stores under another name, named in configs as the evaluator names them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tinker
from engine_process import API_KEY
from mlflow import MlflowClient
from sft_config import sft_fields
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator

from deployments.run_lookup import find_run
from deployments.status import status_of
from flows.config.train import SftConfig
from flows.sft import sft
from flows.sweep import sweep
from flows.sweeps.config import SweepConfig

pytestmark = pytest.mark.usefixtures("prefect_server")
NAME, IN_MLFLOW = "pass@1", "pass-x40-1"


class PassAt1(TrainingClientEvaluator):
    """Metric `pass@1`, the likelihood of a text, and a metric without a value."""

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        tokens = list(range(5, 21))
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # pyright: ignore
        output = await training_client.forward([datum], "cross_entropy")
        return {NAME: sum(output.loss_fn_outputs[0]["logprobs"].data), "blank": math.nan}


@pytest.fixture
def fields(tmp_path: Path, mlflow_uri: str, engine_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    evaluators = {"evaluators": [{"builder": f"{__name__}:PassAt1"}], "eval_every": 1, "checkpoint_every": 1}
    return sft_fields(tmp_path, "named", mlflow_uri, engine_url) | evaluators | {"num_steps": 3, "objective": {}}


@pytest.mark.parametrize("name", [NAME, IN_MLFLOW])
def test_run_keeps_and_promotes_the_best_checkpoint(fields: dict[str, Any], mlflow_uri: str, name: str) -> None:
    best = {"keep_best": {"metric": name, "mode": "max"}}
    promotion = {"register_as": "named-metric", "promote_if": f"{name} > -1e9"}
    result = sft(SftConfig.model_validate(fields | best | promotion))
    points = MlflowClient(mlflow_uri).get_metric_history(result.mlflow_run_id, IN_MLFLOW)
    values = {point.step: point.value for point in points if point.step > 0}
    assert len(values) == 3
    lines = [json.loads(line) for line in (Path(result.directory) / "checkpoints.jsonl").read_text().splitlines()]
    (*_, noted) = [line for line in lines if "best" in line]
    assert (noted["best_step"], noted["value"]) == max(values.items(), key=lambda item: item[1])
    assert result.not_promoted == ""
    warning = "blank is nan at step 0: keep_best ignores it; check its evaluator."
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert tags["tinker_flows.warning.not_finite.blank"] == warning
    status = status_of(find_run("named", fields["storage"]))
    assert (status.metric, status.value) == (IN_MLFLOW, values[3])


def test_sweep_ranks_its_points(fields: dict[str, Any], mlflow_uri: str) -> None:
    config = {"run_name": "ranked", "base": fields, "space": {"learning_rate": [1e-2, 1e-7]}, "concurrency": 1}
    result = sweep(SweepConfig.model_validate(config | {"metric": NAME, "mode": "max"}))
    assert (result.num_completed, result.num_failed) == (2, 0)
    assert MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.metrics[f"best/{IN_MLFLOW}"] == result.best_value

"""Data that the model writes for itself, in the flows sft and off-policy distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distill_config import distill_fields
from mlflow import MlflowClient
from run_config import run_fields

from flows.config.distill import OffPolicyConfig
from flows.config.plain_data import read_yaml
from flows.config.train import SftConfig
from flows.distill import off_policy_distillation
from flows.estimates.supervised import estimate
from flows.estimates.teacher_data import estimate_teacher_data
from flows.evaluate import EvaluateConfig, evaluate
from flows.sft import sft
from tasks.supervised.generated_data import WRITTEN_NAME

ROOT = Path(__file__).parents[2]
RECIPES = ("noisy_student", "constitution")

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def recipe_fields(folder: Path, recipe: str, tracking: str, base_url: str, **params: Any) -> dict[str, Any]:
    """Return a recipe for the tiny model, which ends its completions at random."""
    fields = read_yaml(ROOT / "examples" / f"{recipe}.yaml")
    fields["data"]["params"] |= {"max_tokens": 256, "temperature": 1.0} | params
    fields["data"]["params"]["common_config"] = {"max_length": 1024, "batch_size": 1}
    steps = {"num_steps": 2, "eval_every": 2, "checkpoint_every": 1}
    return fields | run_fields(folder, recipe, tracking, base_url) | steps


@pytest.mark.parametrize("recipe", [RECIPES[0], pytest.param(RECIPES[1], marks=pytest.mark.slow)])
def test_data_is_generated_once(tmp_path: Path, engine_url: str, mlflow_uri: str, recipe: str) -> None:
    # A row of the constitution recipe is kept only if draft, critique and revision all happen to end.
    name, num_rows = ("questions_test", 4) if recipe == "noisy_student" else ("questions", 96)
    questions = (ROOT / "examples" / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(questions[:num_rows]))
    changes: dict[str, Any] = {"path": str(tmp_path / "rows.jsonl"), "test_path": str(tmp_path / "rows.jsonl")}
    if recipe == "noisy_student":  # its random completions need not agree
        changes |= {"num_samples": 4, "min_agreement": 0.0}
    fields = recipe_fields(tmp_path, recipe, mlflow_uri, engine_url, **changes)
    estimated = estimate(SftConfig.model_validate(fields))
    written = tmp_path / "runs" / recipe / WRITTEN_NAME
    content = written.read_bytes()
    first = sft(SftConfig.model_validate(fields))
    assert written.read_bytes() == content, "the run trains on the answers that the estimate sampled"
    assert first.num_steps == 2
    assert "test/nll" in first.metrics
    tokens = MlflowClient(mlflow_uri).get_metric_history(first.mlflow_run_id, "num_tokens")
    assert estimated.num_tokens == sum(point.value for point in tokens)
    checkpoints = tmp_path / "runs" / recipe / "checkpoints.jsonl"
    checkpoints.write_text("".join(checkpoints.read_text().splitlines(keepends=True)[:1]))  # as if killed after step 0
    assert sft(SftConfig.model_validate(fields)).resumed_from == 1
    assert written.read_bytes() == content

    places = {key: fields[key] for key in ("base_url", "storage", "tracking", "data")}
    evaluation = {"run_name": f"evaluated-{recipe}", "checkpoint": f"{recipe}@final"}
    measured = evaluate(EvaluateConfig.model_validate({**places, **evaluation}))
    assert measured.metrics["test/nll"] == pytest.approx(first.metrics["test/nll"], abs=1e-6)


def test_the_estimate_of_a_distillation_writes_the_data_of_its_run(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    questions = (ROOT / "examples" / "data" / "questions_test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(questions[:4]))
    changes = {"path": str(tmp_path / "rows.jsonl"), "num_samples": 4, "min_agreement": 0.0}
    data = recipe_fields(tmp_path, "noisy_student", mlflow_uri, engine_url, **changes)["data"]
    del data["params"]["test_path"]
    fields = distill_fields(tmp_path, "taught", mlflow_uri, engine_url)
    config = OffPolicyConfig.model_validate(fields | {"datasets": [{"data": data}], "top_k": 4, "batch_size": 1})
    expected = estimate_teacher_data(config)
    written = tmp_path / "runs" / "taught" / WRITTEN_NAME
    content = written.read_bytes()
    metrics = off_policy_distillation(config).metrics  # pyright: ignore[reportArgumentType]
    assert written.read_bytes() == content, "the run trains on the answers that the estimate sampled"
    assert expected.low.num_train_tokens <= metrics["cost/num_train_tokens"] <= expected.high.num_train_tokens

"""Runs of SDPO on the letters environment: what they train on, and resumption."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from distill_config import distill_fields
from engine_process import EngineProcess
from metric_history import curve
from mlflow import MlflowClient
from pydantic import ValidationError
from rl_config import rl_fields
from saved_weights import saved_weights

from flows.config.distill import OnPolicyConfig
from flows.distill import on_policy_distillation
from flows.runs.result import TrainResult
from tasks.distillation.hindsight import Hindsight
from tasks.rl.rollouts.group_rollout import Group

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def sdpo_fields(folder: Path, run_name: str, tracking: str, base_url: str, **hindsight: Any) -> dict[str, Any]:
    """Return a run of three steps whose teacher is the policy itself."""
    return distill_fields(folder, run_name, tracking, base_url) | {
        "datasets": [{"environment": rl_fields(folder, "", "")["environment"]}],
        "batch_size": 2,
        "num_steps": 3,
        "eval_every": 3,
        "checkpoint_every": 1,
        "teacher_sync_every": 1,
        "hindsight": {"success_reward": 0.0, **hindsight},
    }


def run(fields: dict[str, Any]) -> TrainResult:
    return on_policy_distillation(OnPolicyConfig.model_validate(fields))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = sdpo_fields(tmp_path, "whole", mlflow_uri, engine_url)
    result = run(fields)
    directory = Path(result.directory)
    # Every rollout counts as a success, so each sees another one; the teacher differs only by this context.
    assert curve(result, "hindsight/taught") == [1.0] * 3
    assert abs(curve(result, "teacher_kl")[0]) > 1e-3
    assert curve(result, "teacher_age") == [0.0] * 3
    # The teacher scores the eight samples of a step. Before, the run asks the service whether it scores last tokens.
    scored = curve(result, "cost/num_scoring_tokens")[:3]
    assert [now - before for before, now in pairwise([1.0, *scored])] == [8.0] * 3
    assert len(curve(result, "test/env/all/reward/total")) == 2

    def logged() -> list[float]:
        rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        return [row["teacher_kl"] for row in rows if "teacher_kl" in row]

    whole = logged()
    records = (directory / "checkpoints.jsonl").read_text().splitlines()
    kept = [line for line in records if json.loads(line)["step"] <= 1]
    (directory / "checkpoints.jsonl").write_text("".join(f"{line}\n" for line in kept))
    assert run(fields).resumed_from == 1
    assert logged() == pytest.approx(whole, abs=1e-5)


def test_soft_targets(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = sdpo_fields(tmp_path, "soft", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 0}
    result = run(fields | {"top_k": 8, "objective": {"base_loss": "teacher_reverse_kl_topk"}})
    assert all(distance > 0 for distance in curve(result, "teacher_kl/forward"))


def test_a_run_without_successes_warns(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Its steps move no weight, with advantages and with soft targets."""
    fields = sdpo_fields(tmp_path, "hopeless", mlflow_uri, engine_url, success_reward=5.0)
    fields |= {"num_steps": 2, "eval_every": 0, "compute_post_kl": True}
    result = run(fields)
    assert curve(result, "hindsight/taught") == [0.0, 0.0]
    assert curve(result, "kl_pre_post_v2") == pytest.approx([0.0, 0.0], abs=1e-8)
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert "has a context for its teacher" in tags["tinker_flows.warning.hindsight"]
    soft = run(fields | {"run_name": "hopeless-soft", "top_k": 8, "compute_post_kl": False})
    assert curve(soft, "hindsight/skipped_update") == [1.0, 1.0]
    assert "optim/grad_norm" not in soft.metrics, "no optimizer step is taken"


@pytest.mark.parametrize("base_loss", ["cross_entropy", "teacher_reverse_kl_topk"])
def test_regularizers_alone_train_on_a_step_without_contexts(
    base_loss: str, tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    """A step whose base loss has nothing to learn equals one with contexts and without a base loss."""
    fields = sdpo_fields(tmp_path, base_loss, mlflow_uri, engine_url, success_reward=5.0)
    regularizer = {"name": "negative_entropy_topk", "weight": 0.5}
    fields |= {"num_steps": 1, "eval_every": 0, "top_k": 8, "teacher_sync_every": 0}
    metrics = run(fields | {"objective": {"base_loss": base_loss, "regularizers": [regularizer]}}).metrics
    assert metrics["hindsight/skipped_update"] == 1
    assert metrics["term/base/grad_norm_weighted"] == metrics["loss/base"] == 0
    assert metrics["loss/total"] == pytest.approx(0.5 * metrics["term/negative_entropy_topk/value"], rel=1e-5)
    assert metrics["optim/grad_norm"] > 1e-3


@pytest.mark.parametrize("base_loss", ["cross_entropy", "teacher_reverse_kl_topk", "importance_sampling"])
def test_a_step_without_contexts_leaves_weights_and_moments(
    base_loss: str, tmp_path: Path, engine: EngineProcess, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first of three steps has contexts; the momentum of its update moves no weight later."""
    contexts, num_groups = Hindsight.contexts, 2
    calls: list[int] = []

    def first_step_alone(self: Hindsight, group: Group) -> list[str]:
        calls.append(len(calls))
        texts = contexts(self, group)
        return texts if len(calls) <= num_groups else [""] * len(texts)

    monkeypatch.setattr(Hindsight, "contexts", first_step_alone)
    fields = sdpo_fields(tmp_path, f"once-{base_loss}", mlflow_uri, engine.url) | {"eval_every": 0}
    fields |= {"top_k": 0 if base_loss == "importance_sampling" else 8}
    result = run(fields | {"objective": {"base_loss": base_loss}})
    assert curve(result, "hindsight/taught") == [1.0, 0.0, 0.0]
    assert curve(result, "hindsight/skipped_update") == [0.0, 1.0, 1.0]
    lines = (Path(result.directory) / "checkpoints.jsonl").read_text().splitlines()
    records = {record["step"]: record for record in map(json.loads, lines) if "state_path" in record}
    one, three = (saved_weights(engine.state, records[step]["state_path"]) for step in (1, 3))
    assert one == three
    assert len(curve(result, "optim/grad_norm")) <= 1, "later steps take no optimizer step"


def test_rewards_train_all_rollouts(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = sdpo_fields(tmp_path, "mixed", mlflow_uri, engine_url, success_reward=5.0)
    result = run(fields | {"num_steps": 2, "eval_every": 0, "train_on_rewards": True})
    assert curve(result, "teacher_kl") == pytest.approx([0.0, 0.0], abs=1e-8)
    assert curve(result, "advantage/std")[0] > 1e-3
    assert curve(result, "optim/grad_norm")[0] > 0


def test_settings_without_a_meaning_are_refused(tmp_path: Path) -> None:
    fields = sdpo_fields(tmp_path, "refused", "", "")
    dataset = fields["datasets"][0]
    with pytest.raises(ValidationError, match="teacher_sync_every works with one dataset, but there are 2"):
        OnPolicyConfig.model_validate(fields | {"datasets": [dataset, dataset]})
    with pytest.raises(ValidationError, match="the teacher is another model, smollm2-135m"):
        OnPolicyConfig.model_validate(fields | {"datasets": [dataset | {"teacher": {"model": "smollm2-135m"}}]})

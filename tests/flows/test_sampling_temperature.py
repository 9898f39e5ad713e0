"""Runs that sample at another temperature than 1, with weights that do not move: nothing differs from the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distill_config import distill_fields, questions
from metric_history import curve
from mlflow import MlflowClient
from rl_config import rl_fields

from flows.config.distill import SelfConfig
from flows.config.rl import RlConfig
from flows.distill import self_distillation
from flows.rl import rl

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")

# The tiny model has 264 tokens, so that the normalizer is exact.
COLD = {"max_tokens": 32, "temperature": 0.5, "num_candidates": 264}
STILL = {"learning_rate": 1e-9, "num_steps": 2, "eval_every": 2}


@pytest.mark.parametrize(
    "schedule", [{}, {"mode": "stream", "num_minibatches": 2}, {"mode": "async", "max_steps_off_policy": 1}]
)
def test_unchanged_weights_have_no_distance_from_their_samples(
    tmp_path: Path, engine_url: str, mlflow_uri: str, schedule: dict[str, Any]
) -> None:
    """The ratios of the loss, in contrast, are those to the distribution that was sampled from."""
    fields = rl_fields(tmp_path, f"cold-{schedule.get('mode', 'sync')}", mlflow_uri, engine_url) | STILL
    objective = {"base_loss": "ppo", "regularizers": [{"name": "kl", "weight": 0.01}]}
    fields |= {"objective": objective, "advantage": {"kl_coefficient": 0.1}, "compute_post_kl": True}
    result = rl(RlConfig.model_validate(fields | {"rollout": COLD, "schedule": schedule, "health": {"patience": 2}}))
    assert curve(result, "optim/kl_sample_train_v1")[0] > 0.1
    assert curve(result, "term/base/ratio_mean")[0] != pytest.approx(1.0, abs=0.01)
    keys = ["mismatch/kl_v1", "mismatch/kl_k3", "kl_policy_base", "kl_pre_post_v1", "test/term/kl/value"]
    for key in [*keys, *(["mismatch/masked"] if schedule else [])]:
        assert curve(result, key) == pytest.approx([0.0, 0.0], abs=1e-3), key
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert "tinker_flows.warning.health.mismatch" not in tags


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = distill_fields(tmp_path, "cold-teacher", mlflow_uri, engine_url) | STILL
    fields |= {"questions": questions(tmp_path, num_train=4), "teacher_prompt": "{question}", "rollout": COLD}
    result = self_distillation(SelfConfig.model_validate(fields | {"objective": {"base_loss": "importance_sampling"}}))
    for key in ("teacher_kl", "test/teacher_kl"):
        assert curve(result, key) == pytest.approx([0.0, 0.0], abs=1e-3)
    assert curve(result, "advantage/std") == pytest.approx([0.0, 0.0], abs=1e-3)

"""The rl flow on the tiny model: real engine, real Prefect server, real MLflow store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from rl_config import rl_fields

from flows.result import TrainResult
from flows.rl import RlConfig, rl

NUM_STEPS = 4


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


def curve(result: TrainResult, tracking: str, key: str) -> list[float]:
    points = MlflowClient(tracking).get_metric_history(result.mlflow_run_id, key)
    return [point.value for point in sorted(points, key=lambda point: point.step)]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: str, engine_url: str, mlflow_uri: str
) -> tuple[Path, dict[str, Any], TrainResult]:
    """Four steps, with a term on the sampled answers, one on the reference, and an evaluation."""
    folder = tmp_path_factory.mktemp("rl")
    terms = [{"name": "kl", "weight": 0.01}, {"name": "length", "weight": 0.01}]
    config = rl_fields(folder, "rl", mlflow_uri, engine_url) | {
        "eval_every": NUM_STEPS,
        "objective": {"base_loss": "importance_sampling", "regularizers": terms},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        return folder, config, rl(RlConfig.model_validate(config))


def test_each_step_is_sampled_from_the_weights_it_trains(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, _, result = run
    for key in ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2"):
        assert curve(result, mlflow_uri, key) == pytest.approx([0.0] * NUM_STEPS, abs=1e-4)
    assert all(entropy > 0 for entropy in curve(result, mlflow_uri, "optim/entropy"))
    assert curve(result, mlflow_uri, "env/all/total_episodes") == [8.0] * NUM_STEPS
    tags = [curve(result, mlflow_uri, f"env/letter_{letter}/reward/total") for letter in "ae"]
    total = curve(result, mlflow_uri, "env/all/reward/total")
    assert [sum(each) / 2 for each in zip(*tags, strict=True)] == pytest.approx(total)
    assert curve(result, mlflow_uri, "term/kl/value")[0] == 0
    assert len(curve(result, mlflow_uri, "test/env/all/reward/total")) == 2


def test_a_scale_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    wrong = rl_fields(tmp_path, "wrong", "") | {"advantage": {"baseline": "leave_one_out", "scale": True}}
    with pytest.raises(ValueError, match="scale goes with the baseline group_mean alone"):
        RlConfig.model_validate(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_learns(tmp_path: Path, prefect_server: str, engine_url: str, mlflow_uri: str, seed: int) -> None:
    config = rl_fields(tmp_path, f"learns-{seed}", mlflow_uri, engine_url) | {
        "seed": seed,
        "num_steps": 60,
        "eval_every": 0,
        "checkpoint_every": 60,
        "learning_rate": 1e-2,
        "lr_schedule": "constant",
        # Without it seed 0 settles on one letter and an end.
        "objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.3}]},
    }
    config["environment"]["params"] |= {"letters": "a", "group_size": 16}
    rewards = curve(rl(RlConfig.model_validate(config)), mlflow_uri, "env/all/reward/total")
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.9

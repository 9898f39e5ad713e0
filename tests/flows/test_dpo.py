"""The dpo flow on the tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from dpo_config import dpo_fields
from metric_history import curve

from blocks import RunStorage
from blocks.errors import ConfigError
from flows.config.dpo import DpoConfig
from flows.dpo import dpo
from flows.estimates.supervised import estimate
from flows.runs.result import TrainResult
from tasks.reports.summary import describe_cost
from tasks.training.checkpoints import read_records
from tasks.training.reference import REFERENCE_NAME

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")
FIGURES = {"dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward"}


def run(folder: Path, name: str, mlflow_uri: str, engine_url: str, **changes: Any) -> TrainResult:
    return dpo(DpoConfig.model_validate(dpo_fields(folder, name, mlflow_uri, engine_url) | changes))


def cached_logprobs(folder: Path, name: str) -> dict[str, str]:
    """Return the cached log-probabilities of the reference, by a key of reference and completion."""
    lines = (folder / "runs" / name / REFERENCE_NAME).read_text().splitlines()
    return {key: logprobs for line in lines for key, logprobs in json.loads(line.partition(" ")[2]).items()}


def test_reference_is_the_start_of_the_run_after_every_restart(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    first = run(tmp_path, "preferences", mlflow_uri, engine_url)
    assert first.metrics.keys() >= FIGURES | {f"test/{key}" for key in FIGURES}
    assert curve(first, "dpo_loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert curve(first, "margin")[0] == pytest.approx(0, abs=1e-5)
    assert curve(first, "test/margin")[1] > 0.1
    rows = {row.metric: row for row in first.held_out}
    for name in ("accuracy", "margin"):
        assert rows[name].after.value == pytest.approx(curve(first, f"test/{name}")[1], abs=1e-6)
    # Not that of accuracy: where rounding makes no pair right at the start, all pairs change alike.
    assert rows["margin"].change.half_width > 0
    assert len(cached_logprobs(tmp_path, "preferences")) == 2 * (4 * 4 + 64)
    fields = dpo_fields(tmp_path, "preferences", mlflow_uri, engine_url)
    estimated = estimate(DpoConfig.model_validate(fields))
    assert estimated.num_train_tokens == first.metrics["cost/num_train_tokens"]
    assert estimated.reference.num_prefill_tokens == first.metrics["cost/num_prefill_tokens"]
    # The reference only scores, so each sampled token belongs to a scored sequence.
    assert first.metrics["cost/num_scoring_tokens"] == first.metrics["cost/num_sample_tokens"] > 0
    assert "(all of them to score sequences" in describe_cost(first.metrics)

    # The reference of a fork is its first checkpoint, also after a restart.
    directory = RunStorage(url=str(tmp_path / "runs")).run_directory("preferences")
    path = read_records(directory).checkpoints[0].state_path
    fork = {"resume": path, "eval_every": 0, "num_steps": 3, "checkpoint_every": 1}
    forked = run(tmp_path, "further", mlflow_uri, engine_url, **fork)
    margins = curve(forked, "margin")
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[2] > 0.01
    before = cached_logprobs(tmp_path, "further")
    assert len(before) == 2 * 3 * 4
    assert not before.keys() & cached_logprobs(tmp_path, "preferences").keys()
    checkpoints = tmp_path / "runs" / "further" / "checkpoints.jsonl"
    checkpoints.write_text("".join(checkpoints.read_text().splitlines(keepends=True)[:2]))  # as if killed after step 0
    (tmp_path / "runs" / "further" / REFERENCE_NAME).unlink()
    assert run(tmp_path, "further", mlflow_uri, engine_url, **fork).resumed_from == 1
    again = cached_logprobs(tmp_path, "further")
    assert len(again) == 2 * 2 * 4
    assert again.items() <= before.items()


def test_cross_entropy_is_rejected(tmp_path: Path) -> None:
    config = dpo_fields(tmp_path, "wrong", "") | {"objective": {"base_loss": "cross_entropy"}}
    with pytest.raises(ConfigError, match="cross_entropy, which would also imitate the rejected"):
        dpo(DpoConfig.model_validate(config))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_dpo_learns(tmp_path: Path, engine_url: str, mlflow_uri: str, seed: int) -> None:
    learned = run(
        tmp_path, f"sure-{seed}", mlflow_uri, engine_url, seed=seed, learning_rate=1e-3, num_steps=48, eval_every=48
    )
    before, after = curve(learned, "test/accuracy")
    assert before < 0.6
    assert after > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ipo", "kto", "simpo", "orpo", "bradley_terry"])
def test_every_other_loss_learns(tmp_path: Path, engine_url: str, mlflow_uri: str, loss: str) -> None:
    changes = {"objective": {"base_loss": loss}, "num_steps": 96, "eval_every": 96, "batch_size": 8, "num_epochs": 3}
    learned = run(tmp_path, loss, mlflow_uri, engine_url, **changes)
    assert curve(learned, "test/accuracy")[-1] > 0.9
    assert f"{loss}_loss" in learned.metrics

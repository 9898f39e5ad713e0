"""Runs with targets on the tiny model: targets are met, reported, and left by inactive multipliers."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from mlflow import MlflowClient
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


def run(fields: dict[str, Any], regularizers: list[dict[str, Any]], **changes: Any) -> TrainResult:
    rare = {"eval_every": 0, "checkpoint_every": 1000, "num_epochs": 99, "granularity": "segment"}
    return sft(SftConfig.model_validate(fields | rare | {"objective": {"regularizers": regularizers}} | changes))


def series(result: TrainResult, key: str) -> list[float]:
    history = MlflowClient(result.tracking_uri).get_metric_history(result.mlflow_run_id, key)
    return [point.value for point in sorted(history, key=lambda point: point.step)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_active_target_is_met_and_an_inactive_one_trains_nothing(
    tmp_path: Path, engine_url: str, mlflow_uri: str, seed: int
) -> None:
    targets = [
        {"name": "kl", "target": {"at_most": 0.3}},
        {"name": "l2", "params": {"of": "probabilities"}, "target": {"at_most": 0.9}},
    ]
    fields = sft_fields(tmp_path, f"targets-{seed}", mlflow_uri, engine_url)
    result = run(fields, targets, num_steps=120, learning_rate=3e-3, seed=seed)
    values = series(result, "term/kl/value")
    assert max(values) > 0.6, "the target is violated before the multiplier has grown"
    # 95 % interval from the means of five parts, because consecutive values are correlated: t(0.975, 4) = 2.776.
    parts = [mean(values[start : start + 6]) for start in range(90, 120, 6)]
    half_width = 2.776 * stdev(parts) / 5**0.5
    assert abs(mean(values[-30:]) - 0.3) <= max(0.03, half_width)
    assert min(series(result, "term/kl/multiplier")[-30:]) > 0
    assert set(series(result, "term/l2/weight")) == {0.0}


def test_charts_report_and_tags(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    regularizers = [
        {"name": "confidence", "target": {"at_most": -5.0, "upper": 0.1, "integral_gain": 1.0}},
        {"name": "l2", "params": {"of": "probabilities"}, "target": {"at_most": 0.9}},
    ]
    changes = {"num_steps": 8, "objective": {"regularizers": regularizers, "watch": {"patience": 2}}}
    result = run(sft_fields(tmp_path, "impossible", mlflow_uri, engine_url), regularizers, **changes)
    assert series(result, "term/confidence/weight") == series(result, "term/confidence/multiplier")
    assert series(result, "term/confidence/multiplier")[0] == 0
    assert series(result, "term/confidence/multiplier")[-1] == 0.1
    assert series(result, "term/confidence/at_bound")[-1] == 1
    tags = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags
    assert tags["tinker_flows.target.confidence"].startswith("missed: value at most -5, mean over the last quarter -0")
    assert tags["tinker_flows.target.l2"].startswith("met without effort: value at most 0.9, mean over")
    assert "with its multiplier at the bound" in tags["tinker_flows.warning.target.confidence"]
    report = Path(result.report).read_text()
    assert "<h2>Targets</h2>" in report
    assert "<td>confidence<td>value at most -5<td>-0" in report
    assert (tmp_path / "runs" / "impossible" / "report_targets.png").stat().st_size > 0

"""Runs with targets on the tiny model: targets are met, reported, and left by inactive multipliers; named rewards."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from dpo_config import dpo_fields
from mlflow import MlflowClient
from rl_config import rl_fields
from sft_config import sft_fields

from flows.config.dpo import DpoConfig
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.dpo import dpo
from flows.rl import rl
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


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


def multipliers(values: list[float], limit: float, unit: float, start: float = 0.0) -> list[float]:
    """Multipliers of an upper limit by the formula of docs/targets.md, with the default gains and without bounds."""
    average, integral, result = values[0], start, [start]
    for value in values:
        average = 0.5 * average + 0.5 * value
        error = min(max((average - limit) / abs(limit), -1.0), 1.0)
        integral = max(integral + unit * 0.05 * error / abs(limit), 0.0)
        result.append(max(integral + unit * 0.5 * error / abs(limit), 0.0))
    return result[:-1]


def test_targets_in_rl_and_a_multiplier_that_falls_to_its_bound(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    fields = rl_fields(tmp_path, "rl-targets", mlflow_uri, engine_url)
    terms = [
        {"name": "kl", "target": {"at_most": 0.02}},
        {"name": "negative_entropy", "target": {"metric": "entropy", "at_least": 6.0}},
        {"name": "l2", "target": {"at_most": 0.9, "initial": 0.1}, "params": {"of": "probabilities"}},
    ]
    objective = {"base_loss": "importance_sampling", "regularizers": terms}
    result = rl(RlConfig.model_validate(fields | {"num_steps": 8, "eval_every": 0, "objective": objective}))
    for name, limit, start, sign in (("kl", 0.02, 0.0, 1), ("negative_entropy", 6.0, 0.0, -1), ("l2", 0.9, 0.1, 1)):
        values = [sign * value for value in series(result, f"term/{name}/value")]
        expected = multipliers(values, sign * limit, 1.0, start)
        assert series(result, f"term/{name}/multiplier") == pytest.approx(expected, rel=1e-6)
        assert series(result, f"term/{name}/weight") == pytest.approx([sign * weight for weight in expected], rel=1e-6)
    assert series(result, "term/negative_entropy/value") == series(result, "term/negative_entropy/entropy")
    assert min(series(result, "term/negative_entropy/multiplier")[1:]) > 0
    falling = series(result, "term/l2/multiplier")
    assert (falling[0], falling[-1]) == (0.1, 0.0)


def test_a_target_in_dpo(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = dpo_fields(tmp_path, "dpo-target", mlflow_uri, engine_url)
    objective = {"base_loss": "dpo", "regularizers": [{"name": "kl", "target": {"at_most": 0.01}}]}
    result = dpo(DpoConfig.model_validate(fields | {"num_steps": 8, "eval_every": 0, "objective": objective}))
    values, used = series(result, "term/kl/value"), series(result, "term/kl/multiplier")
    assert max(used) > 0
    # The unit is one over the tokens of a completion, which the ratio to the multipliers with the unit 1 shows.
    first = next(step for step, multiplier in enumerate(used) if multiplier)
    unit = used[first] / multipliers(values, 0.01, 1.0)[first]
    assert 10 < 1 / unit < 60, "completions of the data have between 10 and 60 bytes"
    assert used == pytest.approx(multipliers(values, 0.01, unit), rel=1e-6)


@pytest.mark.parametrize("schedule", [{}, {"mode": "stream", "num_minibatches": 2}, {"mode": "async"}])
def test_named_rewards(tmp_path: Path, engine_url: str, mlflow_uri: str, schedule: dict[str, Any]) -> None:
    """The environment reports the number of letters; its own reward is that number over the length."""
    fields = rl_fields(tmp_path, f"rewards-{len(schedule)}-{schedule.get('mode')}", mlflow_uri, engine_url)
    rewards = {"num_letters": {"target": {"at_least": 4.0}}, "total": {"weight": 0.5}}
    config = RlConfig.model_validate(fields | {"eval_every": 0, "rewards": rewards, "schedule": schedule})
    result = rl(config)
    letters = series(result, "reward/num_letters/value")
    assert letters == pytest.approx(series(result, "env/all/num_letters"))
    assert series(result, "reward/total/value") == pytest.approx(series(result, "env/all/reward/total"))
    assert series(result, "reward/total/weight") == [0.5] * 4
    # A lower limit of the value is an upper limit of its negative.
    expected = multipliers([-value for value in letters], -4.0, 1.0)
    assert series(result, "reward/num_letters/weight") == pytest.approx(expected)
    assert expected[-1] > 0
    shares = [series(result, f"reward/{name}/share") for name in rewards]
    assert all(sum(pair) == pytest.approx(1) or sum(pair) == 0 for pair in zip(*shares, strict=True))
    assert len(series(result, "reward/cosine/num_letters/total")) == 4
    tags = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags
    assert (
        f"value at least 4, mean over the last quarter {letters[-1]:.4g}"
        in tags["tinker_flows.target.reward/num_letters"]
    )
    assert "reward/num_letters" in (Path(result.directory) / "report.html").read_text()


def test_a_reward_that_nobody_reports_causes_a_warning(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = rl_fields(tmp_path, "unknown-reward", mlflow_uri, engine_url) | {"rewards": {"num_leters": {}}}
    result = rl(RlConfig.model_validate(fields))
    (warning,) = [text for text in result.warnings if "'num_leters'" in text]
    assert "no completion has reported so far" in warning
    assert warning.endswith("If it is misspelled, use one of num_letters, total.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": {"total": {"weight": 1.0, "target": {"at_least": 1.0}}}}, "both a weight and a target"),
        ({"rewards": {"total": {"weight": None}}}, "neither a weight nor a target"),
        ({"rewards": {"total": {"target": {"at_least": 1.0, "metric": "x"}}}}, "has no metric"),
        ({"reward_normalization": "decoupled"}, "set rewards"),
        (
            {"rewards": {"total": {}}, "reward_normalization": "decoupled", "advantage": {"estimator": "gae"}},
            "use the estimator group_mean",
        ),
    ],
)
def test_contradictory_rewards_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RlConfig.model_validate(rl_fields(tmp_path, "wrong", "") | fields)

"""Alerts on metrics: when they fire, and where a run shows them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from pydantic import ValidationError
from sft_config import sft_fields

from flows.config.train import AlertConfig, SftConfig
from flows.sft import sft
from flows.training.watch import Alerts


def steps_of(alert: dict[str, Any], values: list[float | None]) -> list[int]:
    """Steps at which an alert fires for a series of values; None for a step that does not have the metric."""
    alerts = Alerts([AlertConfig.model_validate({"metric": "pass@1", **alert})])
    return [
        step
        for step, value in enumerate(values)
        if alerts.observe(step, {} if value is None else {"pass-x40-1": value})
    ]


@pytest.mark.parametrize(
    ("alert", "values", "steps"),
    [
        ({"above": 2.0}, [2.0, 2.1, 3.0, 2.0, 2.1], [1, 4]),
        ({"above": 2.0, "patience": 3}, [3, 3, 1, 3, 3, 3, 3], [5]),
        ({"above": 2.0, "patience": 2}, [3, None, None, 3], [3]),
        ({"below": 0.5}, [0.5, 0.4, 0.6, 0.4], [1, 3]),
        ({"below": 0.5}, [math.nan], [0]),
        ({"above": 0.5}, [math.nan], [0]),
        ({"above": 0.0}, [0.0, -1.0], []),
    ],
)
def test_an_alert_fires_once_each_time_the_metric_leaves_its_limit(
    alert: dict[str, Any], values: list[float | None], steps: list[int]
):
    assert steps_of(alert, values) == steps


def test_a_resumed_run_continues_to_count():
    config = AlertConfig(metric="a", above=1.0, patience=3)
    whole, first = Alerts([config]), Alerts([config])
    for step in range(2):
        assert not whole.observe(step, {"a": 2.0})
        assert not first.observe(step, {"a": 2.0})
    resumed = Alerts([config, AlertConfig(metric="b", below=0.0)])
    resumed.restore(first.state() | {"removed above 1": 7})
    assert resumed.observe(2, {"a": 2.0}) == whole.observe(2, {"a": 2.0}) != []
    assert resumed.unmeasured() == ["b below 0"]
    assert "removed above 1" not in resumed.state()


@pytest.mark.parametrize("limits", [{}, {"above": 1.0, "below": 0.0}])
def test_an_alert_has_one_limit(limits: dict[str, float]):
    with pytest.raises(ValidationError, match=r"the alert on test/nll needs one limit: set either"):
        AlertConfig.model_validate({"metric": "test/nll", **limits})


def test_a_run_shows_its_alerts(tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    fields = sft_fields(tmp_path, "watched", f"sqlite:///{tmp_path}/mlflow.db", engine_url)
    alerts = [
        {"metric": "train_mean_nll", "above": 0.0, "patience": 2},
        {"metric": "train_mean_nll", "below": 1e6},
        {"metric": "test/nll", "above": 1e6},
        {"metric": "test/typo", "below": 1.0},
    ]
    changes = {"checkpoint_every": 2, "keep_best": {"metric": "train_mean_nl"}, "objective": {"regularizers": []}}
    config = {**fields, "num_steps": 3, "alerts": alerts, **changes}
    result = sft(SftConfig.model_validate(config))
    prefix = "tinker_flows.warning.alert."
    tags = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags
    noted = {key.removeprefix(prefix): text for key, text in tags.items() if key.startswith(prefix)}
    assert noted.keys() == {"train_mean_nll above 0", "train_mean_nll below 1e-x2b-06", "test/typo below 1"}
    assert re.fullmatch(
        r"Alert: train_mean_nll above 0 in 2 consecutive measurements; [0-9.]+ at step 1\.",
        noted["train_mean_nll above 0"],
    )
    assert noted["test/typo below 1"].startswith("The alert test/typo below 1 had no effect, because no step reported")
    assert set(noted.values()) <= set(result.warnings)
    misspelled = "The first step has no metric 'train_mean_nl', which keep_best needs; did you mean 'train_mean_nll'?"
    assert tags["tinker_flows.warning.metric.train_mean_nl"] == misspelled
    assert not any("test/typo" in key for key in tags if "warning.metric." in key)


def test_alerts_that_differ_only_in_patience() -> None:
    configs = [AlertConfig(metric="a", above=1.0, patience=patience) for patience in (1, 3)]
    alerts = Alerts(configs)
    fired = [[warning.text.count("consecutive") for warning in alerts.observe(step, {"a": 2.0})] for step in range(4)]
    assert fired == [[0], [], [1], []]

"""Settings in which an earlier run with a known cost may differ."""

from __future__ import annotations

from flows.config.rl import RlConfig
from flows.estimates.costs import _FREE_FIELDS, _comparable
from flows.evaluate import EvaluateConfig
from flows.runs.tracking.mlflow_run import flatten

COSTS = {"rollout.max_tokens": "6", "guards.spike": "skip", "eval_every": "5", "checkpoint_of_another_setting": "1"}


def test_free_fields_are_settings() -> None:
    assert set(_FREE_FIELDS) <= {*RlConfig.model_fields, *EvaluateConfig.model_fields}


def test_settings_without_effect_on_tokens_may_differ() -> None:
    fields = {
        "run_name": "next",
        "checkpoint_every": 5,
        "promote_if": "test/nll < 1",
        "keep_best": {"metric": "test/nll"},
        "health": {"patience": 9},
        "alerts": [{"metric": "test/nll", "above": 2.0}],
        "task_runner": {"kind": "processes"},
    }
    assert _comparable({**flatten(fields), **COSTS}, ["reference"]) == COSTS
    assert _comparable({"health": "None", "reference": "base", **COSTS}, ["reference"]) == COSTS

"""Plan of a run: its sentences, and the tokens of batches that are not counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.runs.pace import Pace
from flows.training.plan import PlannedTokens, extrapolate_tokens, plan_lines


def sft(**changes: Any) -> SftConfig:
    return SftConfig.model_validate(sft_fields(Path("there"), "planned", "") | changes)


def test_the_plan_names_what_will_be_trained_and_the_price() -> None:
    objective = {
        "base_loss": "cross_entropy",
        "regularizers": [
            {"name": "logic", "weight": 5.0},
            {"name": "confidence", "weight": {"schedule": "linear", "start": 0.0, "end": 0.1}},
            {"name": "length", "weight": 1.0, "enabled": False},
            {"name": "kl", "weight": None, "target": {"at_most": 0.2}},
        ],
    }
    config = sft(objective=objective, eval_every=12, checkpoint_every=0, learning_rate=1e-3, data={"builder": "a:B"})
    tokens = PlannedTokens(16_000, 34_567, 0.5)
    assert plan_lines(config, "sft", range(8, 24), tokens) == [
        "sft of tiny on a:B, 16 of 24 steps, learning rate 0.001",
        "loss cross_entropy + 5 x logic + (0.0347826 to 0.1) x confidence, with kl at most 0.2",
        "evaluation every 12 steps, checkpoint at the end; about 34,567 tokens in passes, $0.5; time unknown",
    ]
    paced = plan_lines(config, "sft", range(8, 24), tokens, Pace("earlier", tokens_per_s=20.0))[2]
    assert paced.endswith("; about 13.3 min at the pace of earlier")
    evaluated = PlannedTokens(16_000, 34_567, 0.5, num_evaluations=3)
    for evaluation_s, end in ((60.0, "16.3 min at the pace of earlier"), (0.0, "earlier, without evaluations")):
        pace = Pace("earlier", 20.0, evaluation_s)
        assert plan_lines(config, "sft", range(8, 24), evaluated, pace)[2].endswith(end)
    resumed = plan_lines(config, "sft", range(8, 24), tokens, Pace(config.run_name, tokens_per_s=20.0))[2]
    assert resumed.endswith("; about 13.3 min at its own pace")
    timed = config.model_copy(update={"checkpoint_every": 4, "checkpoint_every_seconds": 600.0})
    line = plan_lines(timed, "sft", range(24), PlannedTokens(240, 480, None, 0, "sampled tokens", "the first batch"))[2]
    tokens_part = "about 480 tokens in passes (extrapolated from the first batch), price unknown"
    assert line.endswith(f"; {tokens_part}; sampled tokens are not included; time unknown")
    assert "checkpoint every 4 steps or 600 s;" in line
    rare = {"eval_every": 0, "infrequent_evaluators": [{"builder": "a:Slow"}], "infrequent_eval_every": 50}
    line = plan_lines(sft(**rare), "sft", range(24), tokens)[2]
    assert line.startswith("infrequent evaluation every 50 steps, checkpoint every ")


@pytest.mark.parametrize(
    ("counts", "before", "tokens", "basis"),
    [
        ({2: 10, 3: 30, 5: 50}, (0, 0), {2: 10, 3: 30, 5: 50}, ""),
        ({1: 90, 2: 10, 3: 30}, (400, 4), {2: 10, 3: 30, 5: 20}, "2 of 3 batches"),
        ({}, (400, 4), {2: 100, 3: 100, 5: 100}, "the 4 steps trained so far"),
        ({}, (50, 1), {2: 50, 3: 50, 5: 50}, "the step trained so far"),
        ({}, (0, 0), {2: 7, 3: 7, 5: 7}, "the first batch"),
    ],
)
def test_tokens_of_uncounted_batches(
    counts: dict[int, int], before: tuple[int, int], tokens: dict[int, int], basis: str
) -> None:
    assert extrapolate_tokens([2, 3, 5], counts, 7, before) == (tokens, basis)

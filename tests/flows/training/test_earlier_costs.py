"""Costs of a run before its restart: tokens per trained step, and counts that an older version did not record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows.config.train import BudgetConfig
from flows.runs.prices import FREE
from flows.training.budget import Ledger, cost_before_restart
from flows.training.plan import ExpectedTokens, PlannedTokens
from objectives.objective import Objective
from tasks.reports.summary import describe_cost
from tasks.training.batch_source import SampledTokens


def planned(first: int, start: int, num_tokens: int, skipped: set[int]) -> PlannedTokens:
    """Plan the steps from `start` to 10 of a resumed run whose first batch has 7 tokens."""
    config: Any = SimpleNamespace(guards=SimpleNamespace(needs_forward_pass=False), model_dump=lambda include: {})
    schedule: Any = SimpleNamespace(first=first, evaluations=dict)
    source: Any = SimpleNamespace(token_counts=dict, sampled=False)
    evaluation: Any = SimpleNamespace(num_tokens=lambda step: 0, samples=False)
    objective, ledger = Objective("cross_entropy"), Ledger(BudgetConfig(), FREE, {})
    expected = ExpectedTokens(config, schedule, source, objective, evaluation, None, has_reference=False)
    return expected.of_run(range(start, 10), 7, num_tokens, skipped, ledger, in_one_pass=True)


@pytest.mark.parametrize(
    ("first", "start", "num_tokens", "skipped", "mean", "basis"),
    [
        (0, 4, 400, set(), 100, "the 4 steps trained so far"),
        (0, 4, 300, {1}, 100, "the 3 steps trained so far"),
        (0, 2, 100, {0}, 100, "the step trained so far"),
        (0, 4, 300, {1, 8}, 100, "the 3 steps trained so far"),
        (3, 5, 200, set(), 100, "the 2 steps trained so far"),  # a fork does not inherit the tokens of its parent
        (0, 2, 0, {0, 1}, 7, "the first batch"),
    ],
)
def test_the_plan_divides_by_the_steps_that_trained(
    first: int, start: int, num_tokens: int, skipped: set[int], mean: int, basis: str
) -> None:
    tokens = planned(first, start, num_tokens, skipped)
    num_left = sum(step not in skipped for step in range(start, 10))
    assert (tokens.in_batches, tokens.basis) == (mean * num_left, basis)


def cost_of(state: dict[str, float], logged: dict[str, float]) -> dict[str, float]:
    """Resume a run from a recorded and a logged cost, and score 5 sequences."""
    metrics = {f"cost/{key}": [SimpleNamespace(value=value)] for key, value in logged.items()}
    client = SimpleNamespace(get_metric_history=lambda run_id, name: metrics[name])
    log: Any = SimpleNamespace(step_keys=lambda: list(metrics), client=client, run_id="id")
    ledger = Ledger(BudgetConfig(), FREE, cost_before_restart(log, state))
    ledger.add_sampled(SampledTokens(0, 5, 0, 5))
    return {key: value for key, value in ledger.metrics().items() if key != "cost/hours"}


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_run_of_an_older_version_has_no_count_of_scoring_tokens(is_logged: bool) -> None:
    earlier = {"num_prefill_tokens": 0.0, "num_sample_tokens": 20.0, "num_cached_tokens": 0.0}
    metrics = cost_of({} if is_logged else earlier, earlier if is_logged else {})
    assert "cost/num_scoring_tokens" not in metrics
    assert describe_cost(metrics) == "25 tokens sampled, $0"
    again = cost_of({key.removeprefix("cost/"): value for key, value in metrics.items()}, {})
    assert describe_cost(again) == "30 tokens sampled, $0"


def test_later_runs_keep_their_count_of_scoring_tokens() -> None:
    earlier = {"num_prefill_tokens": 0.0, "num_sample_tokens": 20.0, "num_scoring_tokens": 0.0}
    assert describe_cost(cost_of(earlier, {})) == "25 tokens sampled (5 of them to score sequences, one each), $0"
    assert cost_of({}, {})["cost/num_scoring_tokens"] == 5

"""Moving averages of shares, and warnings of what lasts."""

from __future__ import annotations

import json

import pytest

from objectives.spec import WatchSpec
from objectives.watch import Watch


def metrics(share: float, cosine: float = 0.5, between: float = 0.5) -> dict[str, float]:
    return {
        "term/base/grad_share": 1 - share,
        "term/base/cosine_to_base": 1.0,
        "term/a/grad_share": share,
        "term/a/cosine_to_base": cosine,
        "cosine/a/b": between,
        "loss/total": 1.0,
    }


def look(watch: Watch, steps: list[dict[str, float]], first: int = 0) -> list[tuple[int, str]]:
    """The keys of the warnings with the step at which they came."""
    found = []
    for step, of_step in enumerate(steps, start=first):
        watch.look(step, of_step)
        found += [(step, each.key) for each in watch.take_warnings()]
    return found


def test_shares_are_smoothed():
    watch = Watch(WatchSpec(share_decay=0.9))
    assert watch.look(0, metrics(0.4))["term/a/grad_share_ema"] == 0.4
    assert watch.look(1, {}) == {}
    assert watch.look(2, metrics(0.9)) == {
        "term/a/grad_share_ema": pytest.approx(0.9 * 0.4 + 0.1 * 0.9),
        "term/base/grad_share_ema": pytest.approx(0.9 * 0.6 + 0.1 * 0.1),
    }


def test_dominance_is_warned_of_when_it_has_lasted_and_once():
    watch = Watch(WatchSpec(patience=3, dominance_above=0.7))
    shares = [0.8, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.1, 0.8, 0.8, 0.8]
    assert look(watch, [metrics(share) for share in shares]) == [(5, "dominance.a"), (10, "dominance.a")]


def test_the_base_may_dominate():
    assert look(Watch(WatchSpec(patience=1, dominance_above=0.1)), [metrics(0.05)]) == []


def test_conflicts_with_the_base_and_between_terms():
    watch = Watch(WatchSpec(patience=2))
    steps = [metrics(0.5, cosine=-0.1), metrics(0.5, cosine=-0.3, between=-0.2), metrics(0.5, between=-0.2)]
    assert look(watch, steps) == [(1, "conflict.base.a"), (2, "conflict.a.b")]
    watch.restore({})
    assert look(watch, [metrics(0.5, cosine=0.0)] * 3) == []


def test_a_step_without_the_term_neither_counts_nor_ends_it():
    assert look(Watch(WatchSpec(patience=2)), [metrics(0.9), {}, metrics(0.9)]) == [(2, "dominance.a")]


def test_a_warning_is_one_sentence():
    watch = Watch(WatchSpec(patience=1))
    watch.look(7, metrics(0.9, cosine=-0.25))
    texts = [each.text for each in watch.take_warnings()]
    assert texts == [
        "Term 'a' has had more than 80% of the gradient for 1 steps on end, up to step 7: lower its weight.",
        "The gradients of 'base' and 'a' have pulled against each other (cosine -0.25) for 1 steps on end, up to step "
        "7: lower the weight of one, or balance them by pcgrad.",
    ]


def test_a_resumed_run_warns_when_the_first_would_have():
    whole, steps = Watch(WatchSpec(patience=3)), [metrics(0.9)] * 4
    first, second = Watch(WatchSpec(patience=3)), Watch(WatchSpec(patience=3))
    look(first, steps[:2])
    second.restore(json.loads(json.dumps(first.state())))
    assert look(second, steps[2:], first=2) == look(whole, steps) == [(2, "dominance.a")]
    assert second.look(4, metrics(0.1)) == whole.look(4, metrics(0.1))


def preference(accuracy: float = 0.8, margin: float = 1.0, correlation: float = 0.0) -> dict[str, float]:
    figures = {"accuracy": accuracy, "margin": margin, "length_correlation": correlation}
    return {f"term/base/{key}": figure for key, figure in figures.items()}


@pytest.mark.parametrize(
    ("kind", "figures", "num_steps"),
    [
        ("explosion", preference(margin=16.0), 3),
        ("length", preference(correlation=-0.95), 3),
        ("chance", preference(accuracy=0.5), 15),
    ],
)
def test_a_collapse_of_a_preference_loss_is_warned_of(kind, figures, num_steps):
    watch = Watch(WatchSpec(patience=3))
    assert look(watch, [figures] * 30) == [(num_steps - 1, f"{kind}.base")]
    assert look(Watch(WatchSpec(patience=3)), [preference()] * 30) == []
    again = Watch(WatchSpec(patience=3))
    again.look(0, figures)
    resumed = Watch(WatchSpec(patience=3))
    resumed.restore(json.loads(json.dumps(again.state())))
    assert look(resumed, [figures] * 30, first=1) == [(num_steps - 1, f"{kind}.base")]


def test_one_step_is_no_collapse_and_a_metric_of_that_name_no_preference():
    steps = [preference()] * 9 + [preference(accuracy=0.0, margin=40.0, correlation=1.0)]
    assert look(Watch(WatchSpec(patience=1)), steps) == []
    assert look(Watch(WatchSpec(patience=1)), [{"term/mine/length_correlation": 1.0}]) == []

"""Moving averages of gradient shares, and warnings about persistent problems."""

from __future__ import annotations

import json

import pytest

from objectives.config.spec import WatchSpec
from objectives.gradients.alerts import Watch


def metrics(share: float, cosine: float = 0.5, between: float = 0.5) -> dict[str, float]:
    return {
        "term/base/grad_share": 1 - share,
        "term/base/cosine_to_base": 1.0,
        "term/a/grad_share": share,
        "term/a/cosine_to_base": cosine,
        "cosine/a/b": between,
        "loss/total": 1.0,
    }


def collect_warnings(watch: Watch, steps: list[dict[str, float]], first: int = 0) -> list[tuple[int, str]]:
    """Observe all steps and return the keys of the warnings with their steps."""
    events = []
    for step, of_step in enumerate(steps, start=first):
        watch.observe(step, of_step)
        events += [(step, warning.key) for warning in watch.pop_warnings()]
    return events


def test_shares_are_smoothed():
    watch = Watch(WatchSpec(share_decay=0.9))
    assert watch.observe(0, metrics(0.4))["term/a/grad_share_ema"] == 0.4
    assert watch.observe(1, {}) == {}
    assert watch.observe(2, metrics(0.9)) == {
        "term/a/grad_share_ema": pytest.approx(0.9 * 0.4 + 0.1 * 0.9),
        "term/base/grad_share_ema": pytest.approx(0.9 * 0.6 + 0.1 * 0.1),
    }


def test_persistent_dominance_causes_one_warning():
    watch = Watch(WatchSpec(patience=3, dominance_above=0.7))
    shares = [0.8, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.1, 0.8, 0.8, 0.8]
    assert collect_warnings(watch, [metrics(share) for share in shares]) == [(5, "dominance.a"), (10, "dominance.a")]


def test_the_base_loss_may_dominate():
    assert collect_warnings(Watch(WatchSpec(patience=1, dominance_above=0.1)), [metrics(0.05)]) == []


@pytest.mark.parametrize(
    ("trained_prompts", "reason"),
    [(0.0, "its scores do not differ between the completions of a prompt"), (0.5, "of the gradient is 0.0005")],
)
def test_a_scored_term_without_a_share_causes_one_warning(trained_prompts, reason):
    watch = Watch(WatchSpec(patience=2))
    step = metrics(0.0005) | {"term/a/trained_prompts": trained_prompts, "term/a/weight": 1.0}
    for number in range(4):
        watch.observe(number, step)
    (warning,) = watch.pop_warnings()
    assert (warning.key, warning.step) == ("idle.a", 1)
    assert reason in warning.text
    assert collect_warnings(Watch(WatchSpec(patience=1)), [metrics(0.0005), step | {"term/a/weight": 0.0}]) == []


def test_updates_that_make_a_term_worse_cause_one_warning():
    watch = Watch(WatchSpec(patience=2))
    steps = [{"term/a/effect": effect, "term/a/weight": 1.0} for effect in (0.1, -0.1, 0.2, 0.1, 0.3)]
    # Steps without a measurement neither count nor interrupt.
    steps.insert(3, {"term/a/weight": 1.0})
    assert collect_warnings(watch, steps) == [(4, "adverse.a")]
    improving = [{"term/a/effect": -0.1, "term/a/weight": 1.0}] * 5
    assert collect_warnings(Watch(WatchSpec(patience=2)), improving) == []


def test_conflicts_with_the_base_and_between_terms():
    watch = Watch(WatchSpec(patience=2))
    steps = [metrics(0.5, cosine=-0.1), metrics(0.5, cosine=-0.3, between=-0.2), metrics(0.5, between=-0.2)]
    assert collect_warnings(watch, steps) == [(1, "conflict.base.a"), (2, "conflict.a.b")]
    watch.restore({})
    assert collect_warnings(watch, [metrics(0.5, cosine=0.0)] * 3) == []


def test_two_terms_without_a_share_of_the_gradient_are_in_no_conflict_that_matters():
    step = metrics(0.01, cosine=0.5, between=-0.9) | {"term/b/grad_share": 0.02}
    assert collect_warnings(Watch(WatchSpec(patience=1)), [step]) == []
    assert collect_warnings(Watch(WatchSpec(patience=1)), [step | {"term/b/grad_share": 0.2}]) == []
    both = {"term/a/grad_share": 0.1, "term/b/grad_share": 0.2}
    assert collect_warnings(Watch(WatchSpec(patience=1)), [step | both]) == [(0, "conflict.a.b")]


def test_a_cosine_of_0_up_to_rounding_is_no_conflict():
    assert collect_warnings(Watch(WatchSpec(patience=1)), [metrics(0.5, cosine=-1e-7)]) == []


def test_terms_of_weight_0_are_in_no_conflict():
    watch = Watch(WatchSpec(patience=1))
    measured_only = {"term/a/weight": 0.0, "term/b/weight": 1.0, "term/base/weight": 1.0}
    assert collect_warnings(watch, [metrics(0.0, cosine=-0.9, between=-0.9) | measured_only]) == []


def test_a_weighted_term_without_gradient_is_idle():
    shares = [0.0, 1e-9, 0.0, 0.0, 0.0]
    steps = [
        {"term/a/grad_share": share, "term/base/grad_share": share, "term/a/weight": 0.1, "term/base/weight": 0.1}
        for share in shares
    ]
    watch = Watch(WatchSpec(patience=2))
    assert collect_warnings(watch, steps) == [(3, "idle.a")]
    monitors = [{key: value * ("weight" not in key) for key, value in step.items()} for step in steps]
    assert collect_warnings(Watch(WatchSpec(patience=2)), monitors) == []


@pytest.mark.parametrize(
    ("shares", "patience", "expected"),
    [
        ([0.0, 0.0, 0.0], 20, ["idle.a"]),
        ([0.0, 0.1, 0.0], 20, []),
        ([0.0, 0.0], 20, []),  # a trial of two steps
        ([0.0, 0.0, 0.0], 3, ["idle.a"]),  # from the step, and not once more at the end
    ],
)
def test_a_term_that_is_idle_in_all_steps_of_a_short_run(shares: list[float], patience: int, expected: list[str]):
    watch = Watch(WatchSpec(patience=patience))
    for step, share in enumerate(shares):
        watch.observe(step, {"term/a/grad_share": share, "term/a/weight": 1.0})
    watch.end(len(shares))
    assert [warning.key for warning in watch.pop_warnings()] == expected


def test_a_step_without_the_term_does_not_change_the_count():
    assert collect_warnings(Watch(WatchSpec(patience=2)), [metrics(0.9), {}, metrics(0.9)]) == [(2, "dominance.a")]


def test_a_warning_is_one_sentence():
    watch = Watch(WatchSpec(patience=1))
    idle = {"term/c/weight": 1.0, "term/c/grad_share": 0.0}
    watch.observe(7, metrics(0.9, cosine=-0.25) | idle)
    texts = [warning.text for warning in watch.pop_warnings()]
    assert texts == [
        "Term 'a' has had more than 80% of the gradient for 1 consecutive evaluations, up to step 7; lower its weight.",
        "The gradients of 'base' and 'a' have been in conflict (cosine -0.25) for 1 consecutive evaluations, up to "
        "step 7; lower one of the weights, or set balance to dualproj.",
        "Term 'c' has trained next to nothing for 1 consecutive evaluations, up to step 7, because its gradient is "
        "zero; check that its values are not all within its limits, or remove it.",
    ]


def test_a_resumed_run_warns_at_the_same_step():
    uninterrupted, steps = Watch(WatchSpec(patience=3)), [metrics(0.9)] * 4
    first, second = Watch(WatchSpec(patience=3)), Watch(WatchSpec(patience=3))
    collect_warnings(first, steps[:2])
    second.restore(json.loads(json.dumps(first.state())))
    assert (
        collect_warnings(second, steps[2:], first=2) == collect_warnings(uninterrupted, steps) == [(2, "dominance.a")]
    )
    assert second.observe(4, metrics(0.1)) == uninterrupted.observe(4, metrics(0.1))


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
def test_collapse_of_a_preference_loss_causes_a_warning(kind, figures, num_steps):
    watch = Watch(WatchSpec(patience=3))
    assert collect_warnings(watch, [figures] * 30) == [(num_steps - 1, f"{kind}.base")]
    assert collect_warnings(Watch(WatchSpec(patience=3)), [preference()] * 30) == []
    again = Watch(WatchSpec(patience=3))
    again.observe(0, figures)
    resumed = Watch(WatchSpec(patience=3))
    resumed.restore(json.loads(json.dumps(again.state())))
    assert collect_warnings(resumed, [figures] * 30, first=1) == [(num_steps - 1, f"{kind}.base")]


def test_a_single_step_or_a_lone_metric_is_not_a_collapse():
    steps = [preference()] * 9 + [preference(accuracy=0.0, margin=40.0, correlation=1.0)]
    assert collect_warnings(Watch(WatchSpec(patience=1)), steps) == []
    assert collect_warnings(Watch(WatchSpec(patience=1)), [{"term/mine/length_correlation": 1.0}]) == []

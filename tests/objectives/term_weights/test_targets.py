"""Targets: the controller against problems with known multipliers, and its place in an objective."""

from __future__ import annotations

import json
import random
from statistics import mean

import pytest
import torch

from objectives import Batch, Evaluation, Objective, ObjectiveError, Outputs, evaluate_term, linearize, regularizer
from objectives.config.spec import RegularizerSpec, WatchSpec, WeightingSpec
from objectives.config.term_lookup import registered_terms
from objectives.gradients.alerts import Watch
from objectives.gradients.balance import make_balance
from objectives.gradients.linearize import WeightedTerm
from objectives.term_weights.scale import Scale
from objectives.term_weights.targets import TargetController, Targets, TargetSpec

# Multipliers of nuPI of cooper-optim 1.0.1, on a parameter that starts at 3, with lr=1, Kp=0.5, Ki=0.05, ema_nu=0,
# nuPIInitType.ZEROS and maximize=True.
COOPER_ERRORS = [0.75, -0.5, 0.25, 1.0, -0.25, -1.0, 0.5, 0.0]
COOPER_MULTIPLIERS = [3.4125, 2.7625, 3.15, 3.575, 2.9375, 2.5125, 3.2875, 3.0375]


def test_the_controller_is_that_of_cooper() -> None:
    spec = TargetSpec(at_most=1.0, initial=3.0, smoothing=0.0, integral_gain=0.05, proportional_gain=0.5)
    controller = TargetController(spec)
    weights: list[float] = []
    for step, error in enumerate(COOPER_ERRORS):
        controller.observe(step, 1.0 + error)
        weights.append(controller.weight)
    assert weights == pytest.approx(COOPER_MULTIPLIERS, rel=1e-12)


@pytest.mark.parametrize(
    ("target", "minimum", "multiplier"),
    [
        ({"at_most": 1.0}, 3.0, 4.0),
        ({"at_least": 3.0}, 1.0, 4.0),
        ({"equals": 2.0}, 3.0, 2.0),
        ({"equals": 2.0}, 1.0, -2.0),
        ({"at_most": 4.0}, 3.0, 0.0),
        ({"at_least": 2.0}, 3.0, 0.0),
    ],
)
def test_descent_finds_the_multiplier_of_a_quadratic(
    target: dict[str, float], minimum: float, multiplier: float
) -> None:
    """Minimize ``(x - minimum)^2`` under a target for x; at the limit, the multiplier is the slope of the loss there.

    The values that the controller sees are noisy, like those of batches.
    """
    controller = TargetController(TargetSpec.model_validate(target))
    noise = random.Random(0)
    x, points, multipliers = minimum, [], []
    for step in range(2000):
        x -= 0.05 * (2 * (x - minimum) + controller.weight)
        multipliers.append(controller.observe(step, x + noise.gauss(0, 0.3))["multiplier"])
        points.append(x)
    limit = controller.spec.limit
    assert mean(points[1000:]) == pytest.approx(limit if multiplier else minimum, abs=0.05)
    assert mean(multipliers[1000:]) == pytest.approx(multiplier, abs=0.1)
    if multiplier == 0:
        assert multipliers[-1] == 0.0


def test_warmup_and_bounds() -> None:
    controller = TargetController(TargetSpec(at_most=1.0, initial=0.5, upper=2.0, warmup=3))
    figures = [controller.observe(step, 5.0) for step in range(40)]
    multipliers = [figure["multiplier"] for figure in figures]
    assert multipliers[:4] == [0.5] * 4
    assert multipliers[4] > 0.5
    assert max(multipliers) == multipliers[-1] == 2.0
    assert [figures[step]["at_bound"] for step in (0, -1)] == [0.0, 1.0]
    assert figures[-1]["violation"] == pytest.approx(4.0)
    # At half of the limit, the integral falls by 0.025 per step.
    falling = [controller.observe(step, 0.5) for step in range(40, 140)]
    assert falling[60]["multiplier"] > 0
    assert (falling[-1]["multiplier"], falling[-1]["at_bound"]) == (0.0, 0.0)


def test_at_bound_waits_for_the_warmup() -> None:
    controller = TargetController(TargetSpec(at_most=1.0, initial=2.0, upper=2.0, warmup=3))
    assert [controller.observe(step, 5.0)["at_bound"] for step in range(5)] == [0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 1.0, "target": {"at_most": 1.0}}, "both a weight and a target"),
        ({"weight": {"schedule": "constant", "value": 1}, "target": {"at_most": 1.0}}, "both a weight and a target"),
        ({"weight": None}, "neither a weight nor a target"),
        ({"target": {}}, "sets no limit"),
        ({"target": {"at_most": 1.0, "at_least": 0.5}}, "sets at_most and at_least"),
        ({"target": {"at_most": 0.0}}, "set scale"),
        ({"target": {"at_most": 1.0, "lower": 3.0, "upper": 2.0}}, "set lower below upper"),
        ({"target": {"at_most": 1.0, "lower": -1.0}}, "use equals"),
        ({"target": {"at_most": 1.0, "initial": 9.0, "upper": 8.0}}, "initial=9 is outside the bounds 0 and 8"),
        ({"target": {"at_most": 1.0, "initial": -1.0}}, "initial=-1 is outside the bounds 0 and 100"),
        ({"target": {"equals": 0.5, "initial": -9.0, "upper": 5.0}}, "initial=-9 is outside the bounds -5 and 5"),
        ({"target": {"at_most": 1.0, "metric": "mean_probability"}}, "declares no gradient; use the value"),
        ({"name": "negative_entropy", "target": {"at_least": 1.0, "metric": "rest"}}, "no gradient; use entropy"),
        ({"name": "test_watched", "target": {"at_most": 1.0}}, "it is a monitor"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, object], message: str) -> None:
    @regularizer("test_watched", kind="monitor")
    def watched(outputs: Outputs, batch: Batch) -> dict[str, float]:
        return {}

    with pytest.raises(ObjectiveError, match=message):
        Objective(regularizers=[{"name": "confidence", **fields}])


def test_a_spec_with_a_target_survives_a_round_trip() -> None:
    spec = RegularizerSpec.model_validate({"name": "confidence", "target": {"equals": -0.1, "scale": 0.05}})
    dumped = json.loads(spec.model_dump_json())
    assert dumped["weight"] is None
    assert RegularizerSpec.model_validate(dumped) == spec
    assert spec.target is not None
    assert spec.target.bounds == (-2000.0, 2000.0)


def test_a_restored_controller_continues_bit_for_bit() -> None:
    values = [random.Random(1).uniform(0, 2) for _ in range(20)]
    whole = Targets({"a": TargetSpec(at_most=0.7)})
    metrics = [whole.observe(step, {"term/a/value": value}) for step, value in enumerate(values)]
    first = Targets({"a": TargetSpec(at_most=0.7)})
    for step, value in enumerate(values[:9]):
        first.observe(step, {"term/a/value": value})
    resumed = Targets({"a": TargetSpec(at_most=0.7)})
    resumed.restore(json.loads(json.dumps(first.state())))
    rest = [resumed.observe(step, {"term/a/value": value}) for step, value in enumerate(values[9:], start=9)]
    assert rest == metrics[9:]
    resumed.restore({})
    assert resumed.weight_of("a") == 0.0


def test_a_term_without_a_new_value_keeps_its_multiplier() -> None:
    targets = Targets({"a": TargetSpec(at_most=1.0)})
    targets.observe(0, {"term/a/value": 3.0})
    state = targets.state()
    assert targets.observe(1, {"term/b/value": 3.0}) == {}
    assert targets.observe(2, {"term/a/value": 3.0, "term/a/skipped": 1.0}) == {}
    assert targets.state() == state


def test_the_weight_is_the_multiplier_with_the_sign_of_the_limit() -> None:
    objective = Objective(
        regularizers=[
            {"name": "confidence", "target": {"at_least": -0.1, "initial": 3.0}},
            {"name": "l2", "target": {"at_most": 0.2, "initial": 2.0}},
        ]
    )
    assert [objective.weight_at(term, step=5, num_steps=9) for term in objective.regularizers] == [-3.0, 2.0]
    batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    # Two tokens of weight 1: a mean over tokens counts twice.
    assert [objective.factors(batch, 0, 9)(term) for term in objective.regularizers] == [-6.0, 4.0]


def metric_cases() -> list[tuple[str, str]]:
    return [(name, metric) for name, term in sorted(registered_terms().items()) for metric in term.metric_values]


@pytest.mark.parametrize(("name", "metric"), metric_cases())
def test_a_target_on_a_metric_trains_the_metric(name: str, metric: str) -> None:
    """The value is the metric that the term reports, and the gradient that of finite differences."""
    torch.manual_seed(0)
    offsets_D = torch.tensor([0, 3, 5])
    shape = (5, 2) if name.endswith("topk") else (5,)
    logprobs_DT = -1.5 - torch.rand(shape, dtype=torch.float64)
    sampling_DT = None if name.endswith("topk") else logprobs_DT + 0.1
    labels = {"prompt": torch.tensor([0, 0])}
    batch = Batch(
        torch.ones(shape).long(), torch.ones(shape), offsets_D, sampling_logprobs_DT=sampling_DT, labels_D=labels
    )
    estimator = "score_function" if registered_terms()[name].kind == "scored" else "auto"
    (term,) = Objective(
        regularizers=[{"name": name, "target": {"at_most": 1.0, "metric": metric}, "estimator": estimator}]
    ).regularizers

    def evaluate(at_DT: torch.Tensor) -> Evaluation:
        return evaluate_term(term, Outputs(at_DT, sampling_logprobs_DT=sampling_DT), batch, first_step=True)

    evaluation = evaluate(logprobs_DT)
    if estimator == "auto":
        assert evaluation.value == pytest.approx(evaluation.metrics[metric], rel=1e-9)
        for index in range(logprobs_DT.numel()):
            nudge_DT = torch.zeros_like(logprobs_DT).view(-1).index_fill_(0, torch.tensor(index), 1e-6).view(shape)
            slope = (evaluate(logprobs_DT + nudge_DT).value - evaluate(logprobs_DT - nudge_DT).value) / 2e-6
            assert evaluation.gradient_DT.view(-1)[index].item() == pytest.approx(slope, rel=1e-5)
    else:
        # Two samples with 3 and 2 tokens: the advantage of the longer one is 1, and both have the ratio exp(-0.1 T).
        expected = [torch.tensor(-0.3).exp() / 2] * 3 + [-torch.tensor(-0.2).exp() / 2] * 2
        assert evaluation.gradient_DT.tolist() == pytest.approx([float(part) for part in expected])
        assert evaluation.metrics[metric] == 2.5


def test_balancing_leaves_out_a_term_with_a_target() -> None:
    base = Evaluation("base", 2.0, torch.tensor([-1.0, 0.0]))
    opposed = Evaluation("a", 0.5, torch.tensor([4.0, 1.0]))
    limited = Evaluation("b", 0.5, torch.tensor([4.0, -3.0]))
    scale = Scale(1.0, 2.0, 2.0, 1.0)
    balance = make_balance(WeightingSpec(method="dualproj"))
    alone = linearize(base, [WeightedTerm(opposed, 0.5)], balance, 0, scale)
    both = linearize(
        base, [WeightedTerm(opposed, 0.5), WeightedTerm(limited, -0.25, 2.0, is_balanced=False)], balance, 0, scale
    )
    assert alone.metrics["term/base/weight_balanced"] != 1.0, "the two conflict"
    torch.testing.assert_close(both.loss_weights_DT, alone.loss_weights_DT + 0.5 * limited.gradient_DT)
    assert both.metrics["term/b/weight_balanced"] == -0.25
    assert both.metrics["term/b/contribution"] == pytest.approx(-0.25 * 0.5 * 2.0 / 2.0)


def test_warnings_of_a_term_with_a_target() -> None:
    watch = Watch(WatchSpec(patience=2))
    figures = {
        "term/a/weight": 2.0,
        "term/a/multiplier": 2.0,
        "term/a/violation": 0.3,
        "term/a/grad_share": 1e-6,
        "term/a/trained_prompts": 1.0,
        "term/a/effect": 1.0,
        "term/a/cosine_to_base": -0.9,
    }
    for step in range(4):
        watch.observe(step, {**figures, "term/a/at_bound": 0.0})
    assert watch.pop_warnings() == []
    for step in range(4, 8):
        watch.observe(step, {**figures, "term/a/at_bound": 1.0})
    (warning,) = watch.pop_warnings()
    assert (warning.key, warning.step, warning.figure) == ("target.a", 5, 0.3)
    assert warning.text == (
        "Term 'a' has missed its target by 0.3 for 2 consecutive evaluations, up to step 5, with its multiplier at the "
        "bound; relax the target, or widen the multiplier's bounds."
    )


@pytest.mark.parametrize(
    ("base_loss", "name", "unit"),
    [
        ("cross_entropy", "repetition", 2.5),
        ("cross_entropy", "confidence", 1.0),
        ("importance_sampling", "repetition", 1.0),
        ("grpo", "repetition", 1.0),
        ("dr_grpo", "repetition", 1.0),
        ("dr_grpo", "confidence", 1.0),
        ("teacher_reverse_kl_topk", "repetition", 2.5),
        ("dpo", "repetition", 1.0),
        ("dpo", "confidence", 0.4),
    ],
)
def test_the_gains_have_the_unit_of_the_term_beside_the_base_loss(base_loss: str, name: str, unit: float) -> None:
    """Two completions with 3 and 2 tokens; the second evaluation, of shorter ones, does not change the unit."""
    objective = Objective(base_loss, regularizers=[{"name": name, "target": {"at_most": 0.5, "smoothing": 0.0}}])
    for offsets in ([0, 3, 5], [0, 1, 2]):
        size = offsets[-1]
        sampling_DT = torch.full((size,), -1.0)
        batch = Batch(
            torch.ones(size).long(), torch.ones(size), torch.tensor(offsets), sampling_logprobs_DT=sampling_DT
        )
        objective.choose_estimators(batch)
        (term,) = objective.regularizers
        objective.set_gain_unit(term, batch)
        objective.observe(0, {f"term/{name}/value": 1.0})
    # The violation is clamped to one scale: twice the integral gain 0.05, and once the proportional gain 0.5.
    assert objective.targets.weight_of(name) == pytest.approx(unit * (2 * 0.05 + 0.5) / 0.5)
    assert objective.targets.state()[name].get("gain_unit") == unit


def test_the_unit_of_a_term_on_candidates_is_the_length_of_the_data() -> None:
    """Candidates of 2 tokens for data of 2.5: a multiplier has the same strength for any `max_tokens`."""
    spec = {"name": "repetition", "estimator": "score_function", "target": {"at_most": 0.5}}
    objective = Objective(regularizers=[spec])
    data = Batch(torch.ones(5).long(), torch.ones(5), torch.tensor([0, 3, 5]))
    candidates = Batch(torch.ones(4).long(), torch.ones(4), torch.tensor([0, 2, 4]))
    objective.set_gain_unit(objective.regularizers[0], candidates, data)
    assert objective.targets.state()["repetition"].get("gain_unit") == 2.5


def test_the_default_bound_grows_with_the_unit_of_the_gains() -> None:
    controller = TargetController(TargetSpec(at_most=0.5, integral_gain=1000.0))
    controller.set_gain_unit(30.0)
    controller.observe(0, 1.0)
    assert controller.weight == 200.0 * 30.0
    limited = TargetController(TargetSpec(at_most=0.5, integral_gain=1000.0, upper=7.0))
    limited.set_gain_unit(30.0)
    limited.observe(0, 1.0)
    assert limited.weight == 7.0


def test_a_run_whose_gains_had_no_unit_keeps_them() -> None:
    old = Targets({"a": TargetSpec(at_most=0.5, smoothing=0.0)})
    old.restore({"a": {"average": 0.5, "integral": 1.0, "multiplier": 1.0}})
    old.set_gain_unit("a", 30.0)
    old.observe(7, {"term/a/value": 1.0})
    assert old.weight_of("a") == pytest.approx(1.0 + 0.1 + 1.0)


def test_initial_multiplier_may_exceed_the_bound_of_the_unit_1():
    """The default bound grows with the unit of the gains, so the multiplier of an earlier run is accepted."""
    controller = TargetController(TargetSpec(at_most=0.5, initial=250.0, integral_gain=1e-6, proportional_gain=0.0))
    controller.set_gain_unit(100.0)
    controller.observe(0, 0.5)
    assert controller.weight == pytest.approx(250.0)

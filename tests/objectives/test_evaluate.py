from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from ragged_batches import SOLUTIONS, make_batch, ragged

from objectives import (
    Batch,
    Evaluation,
    Objective,
    ObjectiveError,
    Outputs,
    Regularizer,
    evaluate_base,
    evaluate_term,
    prepare_features,
    regularizer,
)
from objectives.reductions import reduce

BUILT_IN = ("confidence", "sparsity", "topology", "logic")


def bind(fn, **fields) -> Regularizer:
    return Objective(regularizers=[{"name": fn if isinstance(fn, str) else fn.name, "fn": fn, **fields}]).regularizers[
        0
    ]


def evaluate(bound: Regularizer, outputs: Outputs, batch: Batch) -> Evaluation:
    batch = replace(batch, features=prepare_features(bound, batch))
    return evaluate_term(bound, outputs, batch, first_step=True)


def finite_differences(bound: Regularizer, outputs: Outputs, batch: Batch) -> list[float]:
    """Gradient of an evaluation's value by central differences, target by target."""
    slopes = []
    for index in range(outputs.logprobs_DT.numel()):
        step = torch.zeros_like(outputs.logprobs_DT)
        step.view(-1)[index] = 1e-6
        high, low = (
            evaluate(bound, replace(outputs, logprobs_DT=outputs.logprobs_DT + sign * step), batch).value
            for sign in (1, -1)
        )
        slopes.append((high - low) / 2e-6)
    return slopes


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("lengths", [[1], [3, 1, 5], [0, 4, 2]])
def test_gradient_of_each_built_in_term(name, lengths):
    texts = ["<<2+2=5>> <<1+1=2>> <<7*2=14>> #### 14", "<<1+1=2>> <<2*3=6>> #### 6", "#### 3"][: len(lengths)]
    masks = [index != 1 for index in range(sum(lengths))]
    batch, outputs = make_batch(lengths, masks=masks, texts=texts)
    bound = bind(name)
    evaluation = evaluate(bound, outputs, batch)
    assert evaluation.gradient_DT.tolist() == pytest.approx(finite_differences(bound, outputs, batch), abs=1e-8)
    assert not evaluation.gradient_DT[~batch.mask_DT].any()


@given(ragged())
@pytest.mark.parametrize(
    ("name", "formula"),
    [("confidence", lambda lp: math.exp(lp) * lp), ("sparsity", lambda lp: math.exp(lp) * (1 - math.exp(lp)))],
)
def test_differentiable_terms_equal_their_formula(name, formula, case):
    batch, outputs = case
    trained = outputs.logprobs_DT[batch.mask_DT].tolist()
    expected = sum(formula(lp) for lp in trained) / len(trained)
    assert evaluate(bind(name), outputs, batch).value == pytest.approx(expected)


@given(ragged())
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sum"])
def test_gradient_under_each_reduction(reduction, case):
    batch, outputs = case

    @regularizer("test_square", reduction=reduction)
    def square(outputs, batch):
        return outputs.logprobs_DT**2

    bound = bind(square)
    evaluation = evaluate(bound, outputs, batch)
    assert evaluation.gradient_DT.tolist() == pytest.approx(finite_differences(bound, outputs, batch), abs=1e-6)


@given(ragged())
@pytest.mark.parametrize("estimator", ["minimum_risk", "score_function", "unlikelihood"])
def test_gradient_under_each_estimator(estimator, case):
    batch, outputs = case
    outputs = replace(outputs, sampling_logprobs_DT=outputs.logprobs_DT.clone())

    @regularizer("test_scores", "scored", estimator=estimator)
    def scores(outputs, batch):
        count = batch.num_tokens if estimator == "unlikelihood" else batch.num_datums
        return np.linspace(0, 1, count)

    bound = bind(scores)
    evaluation = evaluate(bound, outputs, batch)
    assert evaluation.gradient_DT.tolist() == pytest.approx(
        finite_differences(bound, outputs, batch), abs=1e-6, rel=1e-5
    )


def test_a_scored_term_trains_towards_the_datum_that_scores_better():
    batch, outputs = make_batch([2, 2], texts=["<<2+2=5>>", "<<2+2=4>>"])
    evaluation = evaluate(bind("logic"), outputs, batch)
    assert (evaluation.gradient_DT[:2] > 0).all()
    assert (evaluation.gradient_DT[2:] < 0).all()


def test_a_monitor_has_metrics_and_no_gradient():
    @regularizer("test_monitor", "monitor")
    def monitor(outputs, batch):
        assert not outputs.logprobs_DT.requires_grad
        return {"least": outputs.logprobs_DT.min(), "count": batch.num_tokens}

    @regularizer("test_monitor_value", "monitor")
    def monitor_value(outputs, batch):
        return 7, {}

    batch, outputs = make_batch([3])
    evaluation = evaluate(bind(monitor), outputs, batch)
    assert evaluation.metrics == {"least": outputs.logprobs_DT.min().item(), "count": 3.0}
    assert (evaluation.value, evaluation.gradient_DT.tolist()) == (0.0, [0.0] * 3)
    assert evaluate(bind(monitor_value), outputs, batch).value == 7.0


@given(ragged())
def test_cross_entropy_has_the_negative_weights_as_gradient(case):
    batch, outputs = case
    base = evaluate_base(Objective().base, outputs, batch)
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    expected = -(batch.weights_DT * logprobs_DT).sum()
    assert base.value == pytest.approx(expected.item())
    assert torch.equal(base.gradient_DT, torch.autograd.grad(expected, logprobs_DT)[0])


@pytest.mark.parametrize("name", BUILT_IN)
def test_float32_evaluations_are_bitwise_reproducible(name):
    batch, outputs = make_batch([37, 120, 5], texts=SOLUTIONS[:3])
    outputs = Outputs(outputs.logprobs_DT.float())
    first, second = (evaluate(bind(name), outputs, batch) for _ in range(2))
    assert first.gradient_DT.dtype == torch.float32
    assert first.value == second.value
    assert torch.equal(first.gradient_DT, second.gradient_DT)
    assert not outputs.logprobs_DT.requires_grad


# What a term can do wrong.


@pytest.mark.parametrize(
    "blind",
    [
        lambda logprobs: torch.ones(3),
        lambda logprobs: logprobs.detach(),
        lambda logprobs: logprobs.round(),
        lambda logprobs: logprobs * 0,
        lambda logprobs: (-logprobs.float()).exp().clamp(max=0.5),  # at -100, its gradient is NaN
        lambda logprobs: (logprobs < -1).double(),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_differentiable_term_without_gradient_raises(blind, on_error):
    @regularizer("test_blind")
    def term(outputs, batch):
        return blind(outputs.logprobs_DT)

    batch, outputs = make_batch([3])
    bound = bind(term, on_error=on_error)
    with pytest.raises(ObjectiveError, match=r"'test_blind' is declared differentiable.*'scored'.*'monitor'"):
        evaluate_term(bound, outputs, batch, first_step=True)
    if on_error == "raise":
        assert evaluate_term(bound, outputs, batch, first_step=False).gradient_DT.any().item() is False
    else:
        with pytest.raises(ObjectiveError, match="is declared differentiable"):
            evaluate_term(bound, outputs, batch, first_step=False)


def test_a_term_that_is_flat_at_one_point_only_is_accepted():
    @regularizer("test_kl", needs=("ref_logprobs",))
    def kl(outputs, batch):
        return (outputs.logprobs_DT - outputs.ref_logprobs_DT) ** 2

    batch, outputs = make_batch([3])
    outputs = replace(outputs, ref_logprobs_DT=outputs.logprobs_DT)
    assert evaluate(bind(kl), outputs, batch).gradient_DT.tolist() == [0.0] * 3


@pytest.mark.parametrize("lengths", [[1], [3, 2]])
@pytest.mark.parametrize(
    "hinge",
    [
        lambda logprobs: (-logprobs - 12).relu(),
        lambda logprobs: (logprobs.exp() - 0.995).relu(),
        lambda logprobs: (-logprobs.mean() - 60).relu() + 0 * logprobs,
        lambda logprobs: (logprobs.exp().mean() - 0.995).relu() + 0 * logprobs,
    ],
)
def test_a_hinge_far_from_the_logprobs_is_accepted(hinge, lengths):
    @regularizer("test_hinge")
    def term(outputs, batch):
        return hinge(outputs.logprobs_DT)

    batch, outputs = make_batch(lengths)
    outputs = replace(outputs, logprobs_DT=-1 - 0.1 * torch.rand_like(outputs.logprobs_DT))
    assert not evaluate(bind(term), outputs, batch).gradient_DT.any()


def raising():
    raise RuntimeError("no connection\nto the knowledge base.")


@pytest.mark.parametrize(
    "pack_values",
    [list, tuple, torch.stack, lambda values: [value.reshape(1) for value in values]],
    ids=["list", "tuple", "stack", "one element each"],
)
def test_a_list_of_tensors_keeps_their_gradients(pack_values):
    """One value per datum: the gradient of each mean is minus one over its length, because the values are added up."""

    @regularizer("test_listed", reduction="sum")
    def listed(outputs, batch):
        return pack_values([-part.mean() for part in outputs.logprobs_DT.split([2, 3])])

    batch, outputs = make_batch([2, 3])
    for first_step in (True, False):
        evaluation = evaluate_term(bind(listed, name="listed"), outputs, batch, first_step)
        expected = torch.tensor([-1 / 2] * 2 + [-1 / 3] * 3)
        torch.testing.assert_close(evaluation.gradient_DT, expected, check_dtype=False)


@pytest.mark.parametrize(
    ("fn", "declared", "message"),
    [
        (
            lambda o, b: raising(),
            {},
            "failed evaluating: it raised RuntimeError: no connection to the knowledge base (test_evaluate.py, line "
            f"{raising.__code__.co_firstlineno + 1}) (set on_error='skip'",
        ),
        (lambda o, b: sys.exit(), {}, "failed evaluating: it called sys.exit() (test_evaluate.py, line "),
        (lambda o, b: sys.exit("no key."), {}, "failed evaluating: it called sys.exit('no key.') (test_evaluate.py"),
        (lambda o, b: None, {}, "it returned NoneType instead of numbers"),
        (lambda o, b: (o.logprobs_DT, 1.0), {}, "it returned tuple instead of numbers"),
        (lambda o, b: {"a": 1}, {}, "it returned dict instead of numbers"),
        (lambda o, b: o.logprobs_DT.to(torch.complex64), {}, "it returned complex numbers; return real ones"),
        (lambda o, b: np.array([1j, 2.0]), {"kind": "scored"}, "it returned complex numbers; return real ones"),
        (
            lambda o, b: (o.logprobs_DT, {"rows": o.logprobs_DT}),
            {},
            "its metric 'rows' is Tensor instead of one",
        ),
        (lambda o, b: (o.logprobs_DT, {"name": "a"}), {}, "its metric 'name' is str instead of one number"),
        (lambda o, b: (o.logprobs_DT, {"value": 1.0}), {}, "its metric names value are reserved"),
        (lambda o, b: o.logprobs_DT.sum(), {}, "shape () with the reduction 'token_mean'"),
        (lambda o, b: o.logprobs_DT, {"reduction": "none"}, "shape (5,) with the reduction 'none'"),
        (lambda o, b: o.logprobs_DT[:4], {}, "shape (4,) with the reduction 'token_mean'"),
        (lambda o, b: o.logprobs_DT / 0, {}, "has the value -inf, which is not finite"),
        (lambda o, b: o.logprobs_DT.log(), {}, "has the value nan, which is not finite"),
        (lambda o, b: (o.logprobs_DT - o.logprobs_DT).sqrt(), {}, "is not finite at 5 of 5 logprobs"),
        (lambda o, b: [0.0], {"kind": "scored"}, "shape (1,), but the estimator 'minimum_risk' expects (2,)"),
        (lambda o, b: [0.0, math.inf], {"kind": "scored"}, "has the value nan, which is not finite"),
        (
            lambda o, b: [0.0, 1.0],
            {"kind": "scored", "estimator": "unlikelihood"},
            "shape (2,), but the estimator 'unlikelihood' expects (5,)",
        ),
        (
            lambda o, b: [0.0, 1.0],
            {"kind": "scored", "estimator": "score_function"},
            "use 'auto', 'minimum_risk' or 'unlikelihood'",
        ),
        (lambda o, b: o.ref_logprobs_DT, {"needs": ("ref_logprobs",)}, "needs ref_logprobs, which the outputs and"),
    ],
)
def test_a_failing_term_raises_one_sentence_with_its_name(fn, declared, message):
    term = regularizer("test_failing", **declared)(fn)
    batch, outputs = make_batch([2, 3])
    with pytest.raises(ObjectiveError) as error:
        evaluate(bind(term, name="culprit"), outputs, batch)
    text = str(error.value)
    assert message in text
    assert "'culprit'" in text
    assert text.endswith(".")
    assert "\n" not in text


def test_a_gradient_with_several_targets_per_position_counts_each_target():
    @regularizer("test_root_of_zero")
    def root_of_zero(outputs, batch):
        return (outputs.logprobs_DT - outputs.logprobs_DT).sqrt().mean(1)

    batch, outputs = make_batch([2, 1])
    targets_DT, weights_DT, logprobs_DT = (
        tensor[:, None].expand(3, 4) for tensor in (batch.target_tokens_DT, batch.weights_DT, outputs.logprobs_DT)
    )
    batch = Batch(targets_DT, weights_DT, batch.offsets_D)
    with pytest.raises(ObjectiveError, match="is not finite at 12 of 12 logprobs"):
        evaluate(bind(root_of_zero), Outputs(logprobs_DT), batch)


@pytest.mark.parametrize(
    ("shape", "reduction", "fix"),
    [
        ((4,), "token_mean", "return (5,) per token or (2,) per datum"),
        ((5, 1), "sum", "return (5,) per token or (2,) per datum"),
        ((4,), "none", "return a 0-d value"),
        ((), "token_mean", "declare the reduction 'none'"),
        ((5,), "none", "declare the reduction 'token_mean', 'sequence_mean' or 'sum'"),
    ],
)
def test_the_fix_of_a_wrong_shape_fits_it(shape, reduction, fix):
    batch, _ = make_batch([2, 3])
    with pytest.raises(ObjectiveError) as error:
        reduce(torch.zeros(shape), batch, reduction)
    assert str(error.value).endswith(f"with the reduction {reduction!r}; {fix}")


@pytest.mark.parametrize(
    ("error", "message"), [(OSError("disk"), "it raised OSError: disk"), (SystemExit(0), r"it called sys\.exit\(0\)")]
)
def test_a_failing_prepare_raises_with_the_term_name(error, message):
    def look_up(batch):
        raise error

    @regularizer("test_prepared", "scored", prepare=look_up)
    def term(outputs, batch):
        return batch.features

    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match=f"Term 'test_prepared' failed preparing: {message}"):
        prepare_features(bind(term), batch)
    with pytest.raises(ObjectiveError, match="needs prepared features, but the batch has none"):
        evaluate_term(bind(term), outputs, batch, first_step=True)


def test_logprobs_of_another_batch_raise():
    batch, _ = make_batch([2, 3])
    _, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match=r"shape \(2,\), but the targets of the batch have \(5,\)"):
        evaluate(bind("confidence"), outputs, batch)


def test_a_base_loss_that_is_not_finite_raises():
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match="'base' has the value nan"):
        evaluate_base(Objective().base, Outputs(outputs.logprobs_DT * math.nan), batch)

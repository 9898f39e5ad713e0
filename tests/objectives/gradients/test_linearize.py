from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch, ragged

from objectives import (
    Evaluation,
    Objective,
    ObjectiveError,
    Outputs,
    evaluate_base,
    evaluate_term,
    linearize,
    prepare_features,
)
from objectives.config.spec import WeightingSpec
from objectives.estimators import minimum_risk
from objectives.gradients.balance import make_balance
from objectives.gradients.linearize import WeightedTerm, join_metrics
from objectives.losses import cross_entropy
from objectives.reductions import reduce
from objectives.term_weights.scale import Scale


@given(ragged(), st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_the_linear_loss_has_the_gradient_of_the_objective(case, weights):
    """The loss weights equal the gradient of the complete objective by autograd."""
    batch, outputs = case
    names = ["confidence", "sparsity", "logic"]
    batch = replace(batch, texts_D=tuple(f"<<1+1={d % 3 + 1}>>" for d in range(batch.num_datums)))
    objective = Objective(regularizers=[{"name": name} for name in names])
    terms = [
        (evaluate_term(term, outputs, replace(batch, features=prepare_features(term, batch)), True), weight)
        for term, weight in zip(objective.regularizers, weights, strict=True)
    ]
    linear = linearize(evaluate_base(objective.base, outputs, batch), terms)

    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    p = logprobs_DT.exp()
    wrong_D = torch.tensor([float(d % 3 + 1 != 2) for d in range(batch.num_datums)], dtype=torch.float64)
    total = (
        cross_entropy(logprobs_DT, batch.weights_DT)
        + weights[0] * reduce(p * logprobs_DT, batch, "token_mean")
        + weights[1] * reduce(p * (1 - p), batch, "token_mean")
        + weights[2] * minimum_risk(Outputs(logprobs_DT), batch, wrong_D)
    )
    (expected,) = torch.autograd.grad(total, logprobs_DT)
    torch.testing.assert_close(linear.loss_weights_DT, -expected, rtol=1e-12, atol=1e-12)
    assert linear.metrics["loss/total"] == pytest.approx(total.item())
    sent = cross_entropy(logprobs_DT, linear.loss_weights_DT)
    torch.testing.assert_close(torch.autograd.grad(sent, logprobs_DT)[0], expected, rtol=1e-12, atol=1e-12)


def test_metrics_of_every_row():
    base = Evaluation("base", 2.0, torch.tensor([3.0, 4.0]), {}, 0.5)
    first = Evaluation("a", 10.0, torch.tensor([0.0, 5.0]), {"own": 7.0}, 0.25)
    second = Evaluation("b", 1.0, torch.tensor([-6.0, 0.0]))
    linear = linearize(base, [(first, 0.2), (second, 0.5)])
    assert linear.loss_weights_DT.tolist() == [0.0, -5.0]
    assert linear.loss_weights_DT.dtype == torch.float32
    assert linear.metrics == pytest.approx(
        {
            "loss/total": 4.5,
            "loss/base": 2.0,
            "loss/regularizers": 2.5,
            "term/base/value": 2.0,
            "term/base/weight": 1.0,
            "term/base/contribution": 2.0,
            "term/base/grad_norm": 5.0,
            "term/base/grad_norm_weighted": 5.0,
            "term/base/grad_share": 5 / 9,
            "term/base/cosine_to_base": 1.0,
            "term/base/duration_s": 0.5,
            "term/a/value": 10.0,
            "term/a/weight": 0.2,
            "term/a/contribution": 2.0,
            "term/a/grad_norm": 5.0,
            "term/a/grad_norm_weighted": 1.0,
            "term/a/grad_share": 1 / 9,
            "term/a/cosine_to_base": 0.8,
            "term/a/duration_s": 0.25,
            "term/a/own": 7.0,
            "term/b/value": 1.0,
            "term/b/weight": 0.5,
            "term/b/contribution": 0.5,
            "term/b/grad_norm": 6.0,
            "term/b/grad_norm_weighted": 3.0,
            "term/b/grad_share": 3 / 9,
            "term/b/cosine_to_base": -0.6,
            "term/b/duration_s": 0.0,
            "cosine/a/b": 0.0,
        }
    )


@pytest.mark.parametrize("method", ["imtl_g", "dualproj", "mgda", None])
def test_weighted_norms_of_minibatches_are_those_of_the_update(method):
    """Balancing gives each minibatch factors of its own; the norms are those of the trained gradients, concatenated."""
    generator = torch.Generator().manual_seed(0)
    balance = make_balance(WeightingSpec(method=method)) if method else None
    parts, trained = [], {"base": [], "a": []}
    for size in (2.0, 3.0, 5.0):
        base, term = (
            Evaluation(name, 1.0, torch.randn(4, generator=generator, dtype=torch.float64) * scale)
            for name, scale in (("base", size), ("a", 0.3))
        )
        scale = Scale(1.0, size, size, size)
        parts.append(linearize(base, [WeightedTerm(term, 0.5, size)], balance, scale=scale))
        # The factors of the gradients in the trained sum, by least squares.
        pair = torch.stack([base.gradient_DT, term.gradient_DT], dim=1)
        factors = torch.linalg.lstsq(pair, -parts[-1].loss_weights_DT[:, None]).solution[:, 0].tolist()
        trained["base"].append(factors[0] * base.gradient_DT)
        trained["a"].append(factors[1] * term.gradient_DT)
    metrics = join_metrics(parts)
    norms = {name: float(torch.cat(pieces).norm()) / 10.0 for name, pieces in trained.items()}
    for name, norm in norms.items():
        assert metrics[f"term/{name}/grad_norm_weighted"] == pytest.approx(norm)
        assert metrics[f"term/{name}/grad_share"] == pytest.approx(norm / sum(norms.values()))


@given(ragged())
def test_cross_entropy_without_terms_keeps_its_weights(case):
    batch, outputs = case
    base = evaluate_base(Objective().base, Outputs(outputs.logprobs_DT.float()), batch)
    assert torch.equal(linearize(base, []).loss_weights_DT, batch.weights_DT)


def test_a_zero_gradient_has_share_and_cosines_of_zero():
    zero = Evaluation("monitor", 3.0, torch.zeros(2))
    metrics = linearize(
        Evaluation("base", 1.0, torch.ones(2)), [(zero, 0.0), (replace(zero, name="other"), 0.0)]
    ).metrics
    assert [metrics[f"term/monitor/{key}"] for key in ("contribution", "grad_share", "cosine_to_base")] == [0.0] * 3
    assert (metrics["cosine/monitor/other"], metrics["loss/total"], metrics["term/base/grad_share"]) == (0.0, 1.0, 1.0)


@given(st.floats(1e-20, 1e15))
def test_shares_and_cosines_do_not_depend_on_the_unit(scale):
    gradient_DT = make_batch([4, 3])[1].logprobs_DT
    rows = [Evaluation(name, 1.0, (gradient_DT * k).float() * scale) for name, k in (("base", 1), ("a", -3))]
    metrics = linearize(rows[0], [(rows[1], 1.0)]).metrics
    assert metrics["term/a/grad_share"] == pytest.approx(0.75)
    assert metrics["term/a/cosine_to_base"] == pytest.approx(-1)


def test_a_sum_beyond_float32_raises():
    base = Evaluation("base", 1.0, torch.ones(1))
    with pytest.raises(ObjectiveError, match=r"weighted gradients of base, huge overflows torch\.float32"):
        linearize(base, [(Evaluation("huge", 1.0, torch.full((1,), 3e38)), 10.0)])

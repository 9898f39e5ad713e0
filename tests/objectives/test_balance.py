"""PCGrad and GradNorm against plain implementations of their papers."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import Evaluation, Objective, ObjectiveError, ObjectiveSpec, linearize
from objectives.balance import GradNorm, PCGrad
from objectives.diagnostics import scalar_products
from objectives.spec import GradNormSpec

GRADIENTS = st.lists(st.lists(st.floats(-3, 3), min_size=5, max_size=5), min_size=2, max_size=5)


def pcgrad_of_the_paper(gradients: list[torch.Tensor], step: int) -> torch.Tensor:
    """Algorithm 1 on the gradients themselves."""
    draw = random.Random(step)
    projected = [gradient.clone() for gradient in gradients]
    for i in range(len(gradients)):
        others = [j for j in range(len(gradients)) if j != i]
        for j in draw.sample(others, len(others)):
            along = projected[i] @ gradients[j]
            if along < -1e-12:
                projected[i] = projected[i] - along / (gradients[j] @ gradients[j]) * gradients[j]
    return torch.stack(projected).sum(0)


@given(GRADIENTS, st.integers(0, 1000), st.data())
def test_pcgrad_is_that_of_its_paper(gradients, step, data):
    # Whole thousandths: a projection that is zero up to rounding has no side.
    rows = [Evaluation(f"t{k}", 1.0, (torch.tensor(g).double() * 1000).round()) for k, g in enumerate(gradients)]
    weights = [1.0, *(data.draw(st.floats(0.1, 4)) for _ in rows[1:])]
    linear = linearize(rows[0], list(zip(rows[1:], weights[1:], strict=True)), PCGrad(), step)
    expected = pcgrad_of_the_paper([w * row.gradient_DT for row, w in zip(rows, weights, strict=True)], step)
    torch.testing.assert_close(linear.loss_weights_DT, -expected, rtol=1e-6, atol=1e-3)


def test_two_gradients_that_conflict_no_longer_do():
    base, term = (Evaluation(name, 1.0, torch.tensor(g)) for name, g in (("base", [1.0, 0.0]), ("a", [-2.0, 1.0])))
    plain, balanced = (linearize(base, [(term, 1.0)], balance) for balance in (None, PCGrad()))
    assert plain.loss_weights_DT.tolist() == [1.0, -1.0]
    # [1, 0] + 0.4 [-2, 1] = [0.2, 0.4], and [-2, 1] + 2 [1, 0] = [0, 1]
    assert balanced.loss_weights_DT.tolist() == pytest.approx([-0.2, -1.4])
    assert balanced.metrics["term/base/weight_balanced"] == pytest.approx(3.0)
    assert balanced.metrics["term/a/weight_balanced"] == pytest.approx(1.4)
    assert balanced.metrics["term/a/weight"] == 1.0
    assert not any("balanced" in key for key in plain.metrics)


def test_gradients_that_agree_are_left_as_they_are():
    products_KK = scalar_products(torch.tensor([[1.0, 0.0], [2.0, 1.0]], dtype=torch.float64))
    weights_K = torch.tensor([1.0, 0.3], dtype=torch.float64)
    assert torch.equal(PCGrad().weights(["base", "a"], [1.0, 1.0], weights_K, products_KK, 0), weights_K)


def gradnorm_of_the_paper(steps, alpha: float, rate: float) -> list[list[float]]:
    """Equations 1 and 2 by autograd: the factors in force at each step."""
    factors = torch.ones(len(steps[0][0]), dtype=torch.float64)
    first = torch.tensor(steps[0][1], dtype=torch.float64)
    used = []
    for norms, values in steps:
        used.append(factors.tolist())
        factors = factors.clone().requires_grad_()
        pulls = factors * torch.tensor(norms, dtype=torch.float64)
        mean = pulls.mean().detach()
        left = torch.tensor(values, dtype=torch.float64) / first
        target = mean * (left / left.mean()) ** alpha
        loss = (pulls - target).abs().sum() / mean
        loss.backward()
        moved = (factors.detach() - rate * factors.grad).clamp(min=1e-3)
        factors = moved * len(moved) / moved.sum()
    return used


@given(
    st.lists(
        st.tuples(*[st.lists(st.floats(0.1, 5), min_size=3, max_size=3)] * 2),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 2),
    st.floats(0.001, 0.3),
)
def test_gradnorm_is_that_of_its_paper(steps, alpha, rate):
    balance = GradNorm(GradNormSpec(method="gradnorm", alpha=alpha, learning_rate=rate))
    expected = gradnorm_of_the_paper(steps, alpha, rate)
    for (norms, values), factors in zip(steps, expected, strict=True):
        products_KK = torch.tensor(norms, dtype=torch.float64).square().diag()
        found = balance.weights(["base", "a", "b"], values, torch.ones(3, dtype=torch.float64), products_KK, 0)
        assert found.tolist() == pytest.approx(factors, rel=1e-9, abs=1e-9)
        balance.restore(json.loads(json.dumps(balance.state())))  # as a checkpoint keeps it


def test_gradnorm_draws_norms_together():
    balance = GradNorm(GradNormSpec(method="gradnorm", alpha=0, learning_rate=0.05))
    weights_K, products_KK = torch.ones(2, dtype=torch.float64), torch.tensor([16.0, 1.0], dtype=torch.float64).diag()
    for _ in range(200):
        found = balance.weights(["base", "a"], [1.0, 1.0], weights_K, products_KK, 0)
    norms = found * products_KK.diagonal().sqrt()
    assert (norms[0] / norms[1]).item() == pytest.approx(1.0, abs=0.3)


def test_gradnorm_leaves_out_what_has_no_gradient_and_refuses_negative_values():
    balance = GradNorm(GradNormSpec(method="gradnorm"))
    products_KK = torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64).diag()
    weights_K = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    for _ in range(3):  # the base alone is left, whose factor is the mean
        found = balance.weights(["base", "flat", "unweighted"], [2.0, -1.0, -1.0], weights_K, products_KK, 0)
        assert found.tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(ObjectiveError, match=r"term 'flat' has the value -1: leave that term out, or .*pcgrad"):
        balance.weights(["base", "flat"], [2.0, -1.0], torch.ones(2), torch.eye(2), 0)


@pytest.mark.parametrize("balance", [None, {"method": "pcgrad"}, {"method": "gradnorm", "alpha": 0.5}])
def test_plain_data_names_the_balance_and_its_state_goes_on(balance):
    spec = ObjectiveSpec.model_validate({"balance": balance})
    first, second = Objective.from_spec(spec), Objective.from_spec(spec)
    rows = [Evaluation(name, 2.0, torch.tensor(g)) for name, g in (("base", [1.0, 0.0]), ("a", [-2.0, 1.0]))]

    def weights_of(objective, value):
        later = replace(rows[1], value=value)
        return linearize(rows[0], [(later, 1.0)], objective.balance, step=3).loss_weights_DT.tolist()

    weights_of(first, 3.0)
    second.restore(json.loads(json.dumps(first.state())))
    went_on = weights_of(first, 1.0)
    assert weights_of(second, 1.0) == went_on
    second.restore({})
    assert (weights_of(second, 1.0) == went_on) == (not balance or balance["method"] != "gradnorm")

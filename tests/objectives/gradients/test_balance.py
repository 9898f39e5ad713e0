"""Balancing rules, compared with their definitions on explicit gradients."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import TypeAdapter
from scipy.optimize import minimize, nnls
from torch import Tensor
from torchjd import aggregation
from torchjd.linalg import QuadprogProjector

from objectives import Evaluation, Objective, ObjectiveError, ObjectiveSpec, linearize
from objectives.config.spec import BalanceSpec, GradNormSpec
from objectives.gradients.balance import (
    MGDA_EPSILON,
    MGDA_STEPS,
    PROJECTION_EPSILON,
    GradNorm,
    SeededDraws,
    make_balance,
    step_seed,
)

SPECS = [
    {"method": "upgrad"},
    {"method": "dualproj"},
    {"method": "cagrad", "c": 0.4},
    {"method": "mgda"},
    {"method": "imtl_g"},
    {"method": "aligned_mtl"},
    {"method": "pcgrad"},
    {"method": "random"},
]
RANDOM = [{"method": "pcgrad"}, {"method": "random"}]


def name_of(spec: dict[str, object]) -> str:
    return str(spec["method"])


def factors_of(gradients_KN: Tensor, spec: dict[str, object], seed: int = 0, step: int = 0) -> Tensor:
    balance = make_balance(TypeAdapter(BalanceSpec).validate_python(spec), seed)
    names = [f"t{k}" for k in range(len(gradients_KN))]
    return balance.factors(names, [1.0] * len(names), gradients_KN @ gradients_KN.T, step)


def total_of(gradients_KN: Tensor, method: str, **params: object) -> Tensor:
    return factors_of(gradients_KN, {"method": method, **params}) @ gradients_KN


def matrices(num_rows: st.SearchStrategy[int], num_columns: int) -> st.SearchStrategy[Tensor]:
    """Gradients of small integers, none of them zero, and often linearly dependent."""
    integers = num_rows.flatmap(lambda rows: arrays("int64", (rows, num_columns), elements=st.integers(-4, 4)))
    return integers.map(lambda array: torch.tensor(array).double()).filter(lambda rows: bool(rows.any(1).all()))


GRADIENTS = matrices(st.integers(2, 5), 5)
INDEPENDENT = matrices(st.integers(2, 4), 5).filter(lambda rows: bool(torch.linalg.svdvals(rows)[-1] > 0.5))


def close(actual: Tensor, expected: Tensor, gradients_KN: Tensor, tolerance: float = 1e-3) -> bool:
    """Compare relative to the size of the gradients."""
    return bool((actual - expected).norm() <= tolerance * gradients_KN.norm())


# The definition of each rule.


def onto_dual_cone(vector_N: Tensor, gradients_KN: Tensor) -> Tensor:
    """Closest vector without a negative scalar product with any gradient.

    By Moreau's theorem it is the residual of the projection onto the negative cone of the gradients.
    """
    coefficients_K, _ = nnls(gradients_KN.T.numpy(), -vector_N.numpy(), maxiter=1000)
    return vector_N + torch.tensor(coefficients_K) @ gradients_KN


@given(GRADIENTS)
def test_upgrad_adds_up_projections_onto_the_dual_cone(gradients_KN):
    total_N = total_of(gradients_KN, "upgrad")
    expected_N = torch.stack([onto_dual_cone(gradient, gradients_KN) for gradient in gradients_KN]).sum(0)
    assert close(total_N, expected_N, gradients_KN)
    assert (gradients_KN @ total_N).min() >= -1e-3 * gradients_KN.norm() ** 2


@given(GRADIENTS)
def test_dualproj_projects_the_sum_onto_the_dual_cone(gradients_KN):
    total_N = total_of(gradients_KN, "dualproj")
    assert close(total_N, onto_dual_cone(gradients_KN.sum(0), gradients_KN), gradients_KN)
    assert (gradients_KN @ total_N).min() >= -1e-3 * gradients_KN.norm() ** 2


def test_a_small_gradient_is_protected_too():
    # With the default regularization of TorchJD, the totals have a cosine of -0.3 with the second gradient.
    gradients_KN = torch.tensor([[1.0, 0.0], [-1e-2, 1e-2]], dtype=torch.float64)
    for method in ("upgrad", "dualproj"):
        total_N = total_of(gradients_KN, method)
        cosines_K = (gradients_KN @ total_N) / gradients_KN.norm(dim=1) / total_N.norm()
        assert cosines_K.min() > -1e-3


def shortest_in_convex_hull(gradients_KN: Tensor) -> float:
    rows = gradients_KN.numpy()
    size = len(rows)
    result = minimize(
        lambda a: ((a @ rows) ** 2).sum(),
        [1 / size] * size,
        jac=lambda a: 2 * rows @ (a @ rows),
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: [1.0] * size},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    return float(result.fun**0.5)


@given(GRADIENTS)
def test_mgda_is_close_to_the_shortest_vector_of_the_convex_hull(gradients_KN):
    factors_K = factors_of(gradients_KN, {"method": "mgda"})
    assert factors_K.min() >= 0
    assert factors_K.sum().item() == pytest.approx(len(factors_K))
    length = (factors_K @ gradients_KN / len(factors_K)).norm().item()
    assert length <= shortest_in_convex_hull(gradients_KN) + 0.15 * gradients_KN.norm(dim=1).min().item()


@given(INDEPENDENT)
def test_imtl_g_has_equal_projections_on_all_gradients(gradients_KN):
    factors_K = factors_of(gradients_KN, {"method": "imtl_g"})
    assume(factors_K.abs().max() < 1e4)  # The weights before their division by their sum nearly cancel.
    assert factors_K.sum().item() == pytest.approx(len(factors_K))
    projections_K = (gradients_KN / gradients_KN.norm(dim=1, keepdim=True)) @ (factors_K @ gradients_KN)
    torch.testing.assert_close(projections_K, projections_K.mean().expand_as(projections_K), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "length"),
    [
        ("min", lambda sigmas: sigmas.min()),
        ("median", lambda sigmas: sigmas.median()),
        ("rmse", lambda sigmas: sigmas.square().mean().sqrt()),
    ],
)
@given(INDEPENDENT)
def test_aligned_mtl_gives_all_principal_components_one_length(
    scale: str, length: Callable[[Tensor], Tensor], gradients_KN: Tensor
):
    # Theorem 1 of the paper: the closest matrix with orthogonal rows is U V^T.
    left_KK, sigmas_K, right_KN = torch.linalg.svd(gradients_KN, full_matrices=False)
    expected_N = length(sigmas_K) * (left_KK @ right_KN).sum(0)
    assert close(total_of(gradients_KN, "aligned_mtl", scale=scale), expected_N, gradients_KN, 1e-6)


@given(GRADIENTS, st.integers(0, 1000), st.integers(0, 1000))
def test_pcgrad_matches_algorithm_1_in_the_same_order(gradients_KN, seed, step):
    generator = torch.Generator().manual_seed(step_seed(seed, step))
    projected_KN = gradients_KN.clone()
    for i in range(len(gradients_KN)):
        for j in torch.randperm(len(gradients_KN), generator=generator).tolist():
            along = projected_KN[i] @ gradients_KN[j]
            # The sign of a projection that is zero up to rounding is arbitrary, and irrelevant.
            if j != i and along < 0:
                projected_KN[i] -= along / (gradients_KN[j] @ gradients_KN[j]) * gradients_KN[j]
    factors_K = factors_of(gradients_KN, {"method": "pcgrad"}, seed, step)
    assert close(factors_K @ gradients_KN, projected_KN.sum(0), gradients_KN, 1e-9)


@given(matrices(st.integers(2, 4), 2), st.floats(0.1, 0.9))
def test_cagrad_maximizes_the_smallest_improvement_near_the_mean(gradients_K2, c):
    mean_2 = gradients_K2.mean(0)
    angles = torch.linspace(0, 2 * torch.pi, 20_001, dtype=torch.float64)
    circle = mean_2 + c * mean_2.norm() * torch.stack([angles.cos(), angles.sin()], 1)
    best = (circle @ gradients_K2.T).min(1).values.max()
    assume(best > 0.05)  # At a Pareto-stationary point, the rule returns 0.
    total_2 = total_of(gradients_K2, "cagrad", c=c) / len(gradients_K2)
    assert (total_2 - mean_2).norm() <= c * mean_2.norm() + 1e-4
    assert (gradients_K2 @ total_2).min() >= best - 1e-3 * gradients_K2.norm() ** 2


def test_random_factors_are_positive_and_average_one():
    factors_SK = torch.stack(
        [factors_of(torch.eye(3).double(), {"method": "random"}, step=step) for step in range(999)]
    )
    assert factors_SK.min() > 0
    torch.testing.assert_close(factors_SK.sum(1), torch.full((999,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(factors_SK.mean(0), torch.ones(3, dtype=torch.float64), rtol=0, atol=0.1)


# Two gradients in conflict: [1, 0] and [-2, 1]. Their norms are 1 and sqrt(5); their scalar product is -2.
_ROOT = 5**0.5


@pytest.mark.parametrize(
    ("method", "total"),
    [
        ("upgrad", [0.2, 1.4]),  # [1, 0] + 0.4 [-2, 1] = [0.2, 0.4], and [-2, 1] + 2 [1, 0] = [0, 1]
        ("pcgrad", [0.2, 1.4]),
        ("dualproj", [0.0, 1.0]),  # The sum [-1, 1] without its component against [1, 0].
        ("mgda", [0.2, 0.6]),  # Twice the foot of the perpendicular from 0, 0.7 [1, 0] + 0.3 [-2, 1].
        ("imtl_g", [2 * (_ROOT - 2) / (1 + _ROOT), 2 / (1 + _ROOT)]),  # Along the bisector, weights sqrt(5) to 1.
    ],
)
def test_two_gradients_in_conflict(method, total):
    gradients_KN = torch.tensor([[1.0, 0.0], [-2.0, 1.0]], dtype=torch.float64)
    assert total_of(gradients_KN, method).tolist() == pytest.approx(total, abs=1e-3)


@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=2, max_size=4))
def test_gradients_without_conflict_are_added_up(rows):
    gradients_KN = torch.tensor(rows).double()
    assume(gradients_KN.any(1).all())
    for method in ("upgrad", "dualproj", "pcgrad"):
        assert factors_of(gradients_KN, {"method": method}).tolist() == pytest.approx([1.0] * len(rows), abs=1e-6)


# The Gramian gives the same result as the gradients.

AGGREGATORS: dict[str, Callable[[], aggregation.Aggregator]] = {
    "upgrad": lambda: aggregation.UPGrad(projector=QuadprogProjector(reg_eps=PROJECTION_EPSILON)),
    "dualproj": lambda: aggregation.DualProj(projector=QuadprogProjector(reg_eps=PROJECTION_EPSILON)),
    "cagrad": lambda: aggregation.CAGrad(c=0.4),
    "mgda": lambda: aggregation.MGDA(MGDA_EPSILON, MGDA_STEPS),
    "imtl_g": aggregation.IMTLG,
    "aligned_mtl": aggregation.AlignedMTL,
    "pcgrad": aggregation.PCGrad,
    "random": aggregation.Random,
}


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@given(INDEPENDENT, st.integers(0, 100))
def test_the_total_is_that_of_torchjds_aggregator_on_the_gradients(spec, gradients_KN, step):
    factors_K = factors_of(gradients_KN, spec, seed=7, step=step)
    assume(factors_K.abs().max() < 1e4)
    norm = gradients_KN.norm()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step_seed(7, step))
        aggregated_N = norm * AGGREGATORS[spec["method"]]()(gradients_KN / norm)
    if spec["method"] != "pcgrad":
        aggregated_N *= len(gradients_KN)
    # Rounding decides a tie between two Frank-Wolfe steps of mgda.
    tolerance = 1e-2 if spec["method"] == "mgda" else 1e-5
    assert close(factors_K @ gradients_KN, aggregated_N, gradients_KN, tolerance)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_unit_of_the_gradients_is_irrelevant(spec):
    # TorchJD takes a Gramian of a trace below 1e-4 for zero.
    gradients_KN = torch.tensor([[1.0, 0.0, 0.5], [-2.0, 1.0, 0.0], [0.0, -1.0, 1.0]], dtype=torch.float64)
    for unit in (1e-6, 1e6):
        torch.testing.assert_close(
            factors_of(unit * gradients_KN, spec), factors_of(gradients_KN, spec), rtol=1e-6, atol=0
        )


# Random numbers.


@pytest.mark.parametrize("spec", RANDOM, ids=name_of)
def test_the_draws_depend_on_the_seed_and_the_step(spec):
    # Each gradient conflicts with the other three, so pcgrad depends on the order.
    gradients_KN = torch.eye(4, dtype=torch.float64) - 0.4
    first = factors_of(gradients_KN, spec, seed=1, step=2)
    assert torch.equal(factors_of(gradients_KN, spec, seed=1, step=2), first)
    others = [factors_of(gradients_KN, spec, seed, step) for seed, step in ((1, 3), (2, 2), (2, 1))]
    assert all(not torch.equal(other, first) for other in others)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_global_generator_is_untouched(spec):
    before = torch.get_rng_state()
    factors_of(torch.eye(4, dtype=torch.float64) - 0.4, spec)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_draw_independently():
    barrier = Barrier(2)

    def draw(seed: int) -> list[Tensor]:
        with SeededDraws(seed):
            barrier.wait()
            draws = []
            for _ in range(100):
                draws += [torch.randn(3), torch.randperm(3)]
            return draws

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(draw, (0, 1))
    generator = torch.Generator().manual_seed(0)
    expected = []
    for _ in range(100):
        expected += [torch.randn(3, generator=generator), torch.randperm(3, generator=generator)]
    assert all(torch.equal(*pair) for pair in zip(first, expected, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first[::2], second[::2], strict=True))


# The objective: weights, terms that are left out, specs.


def rows_of(*gradients: list[float]) -> list[Evaluation]:
    return [Evaluation(f"t{k}", 1.0, torch.tensor(gradient)) for k, gradient in enumerate(gradients)]


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_weights_scale_the_gradients_before_they_are_balanced(spec):
    balance = make_balance(TypeAdapter(BalanceSpec).validate_python(spec))
    weighted = linearize((rows := rows_of([1.0, 0.5], [-2.0, 1.0]))[0], [(rows[1], 0.25)], balance)
    scaled = linearize((rows := rows_of([1.0, 0.5], [-0.5, 0.25]))[0], [(rows[1], 1.0)], balance)
    torch.testing.assert_close(weighted.loss_weights_DT, scaled.loss_weights_DT)


def test_metrics_contain_both_weights():
    base, term = rows_of([1.0, 0.0], [-2.0, 1.0])
    unbalanced, balanced = (
        linearize(base, [(term, 1.0)], balance) for balance in (None, make_balance(GradNormSpec(method="gradnorm")))
    )
    assert balanced.metrics["term/t1/weight"] == 1.0
    assert balanced.metrics["term/t1/weight_balanced"] == 1.0
    assert not any("balanced" in key for key in unbalanced.metrics)


@pytest.mark.parametrize("spec", [*SPECS, {"method": "gradnorm"}], ids=name_of)
def test_gradients_of_zero_are_left_out(spec):
    balances = [make_balance(TypeAdapter(BalanceSpec).validate_python(spec)) for _ in range(2)]
    base, conflict, zero, unweighted = rows_of([1.0, 0.0, 0.3], [-2.0, 1.0, 0.0], [0.0] * 3, [-1.0, -1.0, 0.0])
    alone = linearize(base, [(conflict, 0.5)], balances[0])
    extended = linearize(base, [(zero, 2.0), (conflict, 0.5), (unweighted, 0.0)], balances[1])
    assert torch.equal(extended.loss_weights_DT, alone.loss_weights_DT)
    assert extended.metrics["term/t2/weight_balanced"] == 2.0
    assert extended.metrics["term/t3/weight_balanced"] == 0.0


@pytest.mark.parametrize("spec", [*SPECS, {"method": "gradnorm"}], ids=name_of)
def test_a_single_gradient_keeps_its_weight(spec):
    (base,) = rows_of([1.0, -2.0])
    balance = make_balance(TypeAdapter(BalanceSpec).validate_python(spec))
    assert linearize(base, [], balance).loss_weights_DT.tolist() == [-1.0, 2.0]


def test_shares_count_the_size_of_a_negative_weight():
    # Two gradients in nearly the same direction: imtl_g subtracts the longer one.
    base, term = rows_of([1.0, 0.0], [10.0, 1.0])
    metrics = linearize(
        base, [(term, 1.0)], make_balance(TypeAdapter(BalanceSpec).validate_python({"method": "imtl_g"}))
    ).metrics
    assert metrics["term/t1/weight_balanced"] != 0
    assert 0 < metrics["term/t1/grad_share"] < 1
    assert metrics["term/t0/grad_share"] + metrics["term/t1/grad_share"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "balance", [{"method": "pcgrad"}, {"method": "gradnorm", "alpha": 1.5, "learning_rate": 0.025}]
)
def test_a_config_of_release_0_1_is_unchanged(balance):
    # A run resumes only if its stored config equals the current one.
    assert ObjectiveSpec.model_validate({"balance": balance}).model_dump(mode="json")["balance"] == balance


def test_cagrad_without_its_extra_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "clarabel", None)
    with pytest.raises(
        ObjectiveError, match=r"'cagrad' needs an extra .*clarabel.* pip install 'tinker-flows\[cagrad\]'"
    ):
        Objective.from_spec(ObjectiveSpec.model_validate({"balance": {"method": "cagrad"}}))


# GradNorm.


def gradnorm_of_the_paper(steps, alpha: float, rate: float) -> list[list[float]]:
    """Reference: equations 1 and 2 by autograd; return the factors of each step."""
    factors = torch.ones(len(steps[0][0]), dtype=torch.float64)
    first = torch.tensor(steps[0][1], dtype=torch.float64)
    used = []
    for norms, values in steps:
        used.append(factors.tolist())
        factors = factors.clone().requires_grad_()
        pulls = factors * torch.tensor(norms, dtype=torch.float64)
        mean = pulls.mean().detach()
        ratios = torch.tensor(values, dtype=torch.float64) / first
        target = mean * (ratios / ratios.mean()) ** alpha
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
def test_gradnorm_matches_the_paper(steps, alpha, rate):
    balance = GradNorm(GradNormSpec(method="gradnorm", alpha=alpha, learning_rate=rate))
    expected = gradnorm_of_the_paper(steps, alpha, rate)
    for (norms, values), factors in zip(steps, expected, strict=True):
        gramian_KK = torch.tensor(norms, dtype=torch.float64).square().diag()
        actual = balance.factors(["base", "a", "b"], values, gramian_KK, 0)
        assert actual.tolist() == pytest.approx(factors, rel=1e-9, abs=1e-9)
        balance.restore(json.loads(json.dumps(balance.state())))  # as stored in a checkpoint


def test_gradnorm_equalizes_norms():
    balance = GradNorm(GradNormSpec(method="gradnorm", alpha=0, learning_rate=0.05))
    gramian_KK = torch.tensor([16.0, 1.0], dtype=torch.float64).diag()
    for _ in range(200):
        actual = balance.factors(["base", "a"], [1.0, 1.0], gramian_KK, 0)
    norms = actual * gramian_KK.diagonal().sqrt()
    assert (norms[0] / norms[1]).item() == pytest.approx(1.0, abs=0.3)


def test_gradnorm_ignores_steps_at_which_a_term_is_not_due():
    """With the base loss alone in between, the factors of the common steps are those of the common steps alone."""
    alternating, together = (GradNorm(GradNormSpec(method="gradnorm", learning_rate=0.2)) for _ in range(2))
    both_KK = torch.tensor([16.0, 1.0], dtype=torch.float64).diag()
    for _ in range(5):
        expected = together.factors(["base", "a"], [1.0, 1.0], both_KK, 0)
        assert alternating.factors(["base", "a"], [1.0, 1.0], both_KK, 0).tolist() == pytest.approx(expected.tolist())
        alone = alternating.factors(["base"], [1.0], both_KK[:1, :1], 0)
        assert alone.item() == pytest.approx(together.state()["factors"]["base"])
    assert expected[0] < 0.9


def test_gradnorm_rejects_negative_values_except_of_gradients_that_are_left_out():
    balance = GradNorm(GradNormSpec(method="gradnorm"))
    base, flat, unweighted = (replace(row, value=-1.0) for row in rows_of([2.0], [0.0], [1.0]))
    base = replace(base, value=2.0)
    for _ in range(3):  # only the base loss is active, and its factor is the mean
        assert linearize(base, [(flat, 1.0), (unweighted, 0.0)], balance).loss_weights_DT.tolist() == [-2.0]
    with pytest.raises(
        ObjectiveError, match=r"term 't2' has the value -1; remove this term, or choose another balance"
    ):
        linearize(base, [(unweighted, 1.0)], balance)


@pytest.mark.parametrize("balance", [None, *SPECS, {"method": "gradnorm", "alpha": 0.5}])
def test_a_spec_selects_the_balance_and_its_state_is_restored(balance):
    spec = ObjectiveSpec.model_validate({"balance": balance})
    first, second = Objective.from_spec(spec, seed=5), Objective.from_spec(spec, seed=5)
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

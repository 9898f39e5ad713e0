"""Client-side losses, compared with reference implementations in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import ObjectiveError
from objectives.losses import BUILT_IN, CLIENT_SIDE, enhanced_ppo, find_base_loss, grpo, ppo
from objectives.losses.policy.enhanced_ppo import ppo_parts
from objectives.losses.policy.penalized import mean_kl

# One row per token: log p, log q, A, log ref, V, R.
Row = Sequence[float]
Rows = Sequence[Row]


def clipped(p: float, q: float, a: float, low: float, high: float) -> float:
    r = math.exp(p - q)
    return min(r * a, min(max(r, low), high) * a)


def plain_grpo(answers: Sequence[Rows], low: float, high: float) -> float:
    means = [sum(clipped(*row[:3], low, high) for row in rows) / len(rows) for rows in answers if rows]
    return -sum(means) / max(1, len(means))


def plain_dr_grpo(answers: Sequence[Rows], low: float, high: float) -> float:
    sums = [sum(clipped(*row[:3], low, high) for row in rows) for rows in answers if rows]
    return -sum(sums) / max(1, len(sums))


def plain_dapo(answers: Sequence[Rows], low: float, high: float) -> float:
    values = [clipped(*row[:3], low, high) for rows in answers for row in rows]
    return -sum(values) / max(1, len(values))


def plain_enhanced(answers: Sequence[Rows], low: float, high: float, value: float, entropy: float, kl: float) -> float:
    total = 0.0
    for p, q, a, ref, v, target in (row for rows in answers for row in rows):
        r = math.exp(p - q)
        total -= clipped(p, q, a, low, high)
        total += value * (v - target) ** 2
        total += entropy * r * p
        total += kl * r * (math.exp(ref) / math.exp(p) - 1 + (p - ref))
    return total


def plain_conservative(answers: Sequence[Rows], coeff: float, target: float, cutoff: float) -> float:
    rows = [row for rows in answers for row in rows]
    if not rows:
        return 0.0
    ratios = [math.exp(row[0] - row[1]) for row in rows]
    kl = sum(r - 1 - math.log(r) for r in ratios) / len(rows)
    gain = sum(r * row[2] for r, row in zip(ratios, rows, strict=True))
    return -gain + len(rows) * (coeff * kl + cutoff * max(0.0, kl - 2 * target) ** 2)


PLAIN: dict[str, Callable[..., float]] = {
    "grpo": plain_grpo,
    "dr_grpo": plain_dr_grpo,
    "dapo": plain_dapo,
    "enhanced_ppo": plain_enhanced,
    "conservative_ppo": plain_conservative,
}
BOUNDS = {"clip_low_threshold": 0.6, "clip_high_threshold": 1.1}
OTHER_PARAMS = {
    "grpo": BOUNDS,
    "dr_grpo": BOUNDS,
    "dapo": BOUNDS,
    "enhanced_ppo": {**BOUNDS, "value_coeff": 0.3, "entropy_coeff": 0.2, "kl_coeff": 0.7},
    "conservative_ppo": {"kl_coeff": 0.4, "kl_target": 0.05, "cutoff_coeff": 3.0},
}
INPUTS = ("logprobs", "advantages", "ref_logprobs", "values", "returns")


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of several completions ``(N, 6)`` and their offsets, including empty completions and advantages of 0."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    return make_rows(sum(lengths), draw(st.integers(0, 2**16))), torch.tensor([0, *lengths]).cumsum(0)


def make_rows(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    near = 0.4 * rows[:, [1, 3]]
    rows[:, 0] = -0.1 - rows[:, 0].abs()
    rows[:, [1, 3]] = rows[:, :1] + near
    rows[:, 2] *= torch.rand(count, generator=generator) < 0.7
    return rows


def compute(name: str, logprobs: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, params) -> torch.Tensor:
    loss = find_base_loss(name)
    inputs = dict(zip(INPUTS, rows[:, 1:].unbind(1), strict=True))
    return loss.compute(logprobs, inputs, offsets, loss.check_params(params))


@given(rollouts())
@pytest.mark.parametrize("given_params", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_value_and_gradient_match_the_formula(name, given_params, case):
    rows, offsets = case
    params = OTHER_PARAMS[name] if given_params else find_base_loss(name).defaults

    def slow(at_token: int = 0, step: float = 0) -> float:
        moved = rows.tolist()
        if step:
            moved[at_token][0] += step
        return PLAIN[name]([moved[start:end] for start, end in pairwise(offsets.tolist())], *params.values())

    leaf = rows[:, 0].clone().requires_grad_()
    value = compute(name, leaf, rows, offsets, params)
    value.backward()
    assert value.ndim == 0
    assert value.item() == pytest.approx(slow(), rel=1e-9, abs=1e-9)
    assert leaf.grad is not None
    slopes = [(slow(i, 1e-6) - slow(i, -1e-6)) / 2e-6 for i in range(len(rows))]
    assert leaf.grad.tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_gradcheck(name):
    rows, offsets = make_rows(9, seed=4), torch.tensor([0, 4, 4, 9])
    leaf = rows[:, 0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logprobs: compute(name, logprobs, rows, offsets, OTHER_PARAMS[name]), leaf)


def test_losses_differ_in_length_normalization():
    """Gradient per token for a short and a long completion with ratio 1 and advantage 1."""
    lp, offsets = torch.full((5,), -1.0, dtype=torch.float64), torch.tensor([0, 1, 5])
    rows = torch.stack([lp, lp, torch.ones(5), lp, lp, lp], 1)
    pushes = {}
    for name in ("grpo", "dr_grpo", "dapo", "ppo"):
        leaf = lp.clone().requires_grad_()
        compute(name, leaf, rows, offsets, {}).backward()
        assert leaf.grad is not None
        pushes[name] = [-leaf.grad[0].item(), -leaf.grad[1].item()]
    assert pushes == {
        "grpo": pytest.approx([1 / 2, 1 / 8]),
        "dr_grpo": pytest.approx([1 / 2, 1 / 2]),
        "dapo": pytest.approx([1 / 5, 1 / 5]),
        "ppo": pytest.approx([1, 1]),
    }


def test_completions_of_equal_length_give_ppo_up_to_a_factor():
    rows, offsets = make_rows(6, seed=1), torch.tensor([0, 3, 6])
    expected = ppo(rows[:, 0], rows[:, 1], rows[:, 2]).item()
    actual = [
        compute(name, rows[:, 0], rows, offsets, {"clip_high_threshold": 1.2}).item()
        for name in ("grpo", "dr_grpo", "dapo")
    ]
    assert actual == pytest.approx([expected / 6, expected / 2, expected / 6])


def test_dapo_has_a_higher_upper_bound():
    lp = torch.tensor([-1.0], dtype=torch.float64)
    rows = torch.stack([lp, lp - math.log(1.25), torch.ones(1), lp, lp, lp], 1)
    slopes = {}
    for name in ("dapo", "grpo"):
        leaf = lp.clone().requires_grad_()
        compute(name, leaf, rows, torch.tensor([0, 1]), {}).backward()
        assert leaf.grad is not None
        slopes[name] = leaf.grad.item()
    assert slopes == {"dapo": pytest.approx(-1.25), "grpo": 0.0}


def test_entropy_and_divergence_are_unbiased_off_policy():
    """Exact expectations over the sampling policy equal the entropy and KL, in value and gradient by logits."""
    generator = torch.Generator().manual_seed(7)
    sampler, reference, start = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    logits = start.clone().requires_grad_()
    log_p, log_q, log_ref = logits.log_softmax(0), sampler.log_softmax(0), reference.log_softmax(0)
    q = log_q.exp()
    zeros = torch.zeros(1, dtype=torch.float64)

    def expect(name: str) -> torch.Tensor:
        parts_by_token = [ppo_parts(log_p[i : i + 1], log_q[i : i + 1], zeros, log_ref[i : i + 1]) for i in range(6)]
        return torch.stack([q[i] * getattr(parts, name) for i, parts in enumerate(parts_by_token)]).sum()

    p = log_p.exp()
    for name, truth in (("entropy", -(p * log_p).sum()), ("kl", (p * (log_p - log_ref)).sum())):
        estimate = expect(name)
        assert estimate.item() == pytest.approx(truth.item())
        actual, expected = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, truth))
        torch.testing.assert_close(actual, expected)


def test_mean_kl_estimates_the_divergence_of_the_sampling_policy():
    generator = torch.Generator().manual_seed(8)
    log_p, log_q = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    estimate = sum(log_q[i].exp() * mean_kl(log_p[i : i + 1], log_q[i : i + 1]) for i in range(6))
    assert float(estimate) == pytest.approx(float((log_q.exp() * (log_q - log_p)).sum()))


def test_cutoff_bounds_a_policy_that_diverges_under_importance_sampling():
    """Many gradient steps on tokens of advantage 1: only conservative_ppo keeps the policy close."""
    moved = {}
    for name in ("conservative_ppo", "importance_sampling"):
        loss, sampled = find_base_loss(name), torch.tensor([-3.0, -4.0, -5.0], dtype=torch.float64)
        inputs, leaf = {"logprobs": sampled, "advantages": torch.ones(3)}, sampled.clone().requires_grad_()
        for _ in range(1000):
            (slope,) = torch.autograd.grad(
                loss.compute(leaf, inputs, torch.tensor([0, 3]), loss.check_params({})), leaf
            )
            with torch.no_grad():
                leaf -= 0.002 * slope
                leaf.clamp_(max=0)
        moved[name] = mean_kl(leaf.detach(), sampled).item()
    assert moved["conservative_ppo"] < 0.1
    assert moved["importance_sampling"] > 10


def test_enhanced_ppo_trains_a_critic():
    rows = make_rows(4, seed=2)
    values = rows[:, 4].clone().requires_grad_()
    enhanced_ppo(*rows[:, :4].unbind(1), values, rows[:, 5], value_coeff=0.5).backward()
    torch.testing.assert_close(values.grad, rows[:, 4] - rows[:, 5])


def test_values_far_from_the_sampling_policy_are_finite():
    lp = torch.tensor([-1000.0, -1.0], dtype=torch.float64, requires_grad=True)
    near = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    value = enhanced_ppo(lp, near, ones, near, ones, ones) + grpo(lp, near, ones, torch.tensor([0, 2]))
    (slope,) = torch.autograd.grad(value, lp)
    assert value.isfinite()
    assert slope.isfinite().all()


def test_client_side_losses_are_not_built_in():
    assert not CLIENT_SIDE.keys() & BUILT_IN.keys()
    for loss in CLIENT_SIDE.values():
        assert dict(loss.defaults) == loss.fn.__kwdefaults__
    with pytest.raises(ObjectiveError, match=r"'trpo' is unknown; use one of cross_entropy, .*conservative_ppo"):
        find_base_loss("trpo")

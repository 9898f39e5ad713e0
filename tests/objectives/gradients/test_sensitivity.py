"""Predicted sensitivity to a weight, compared with linearizing with this weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import Evaluation, linearize
from objectives.gradients.sensitivity import Gradients, factor_of_half, respond

NAMES = ("base", "a", "b")


def gradients_of(metrics: dict[str, float]) -> Gradients:
    pairs = {("base", name): metrics[f"term/{name}/cosine_to_base"] for name in NAMES}
    pairs["a", "b"] = metrics["cosine/a/b"]
    cosines = [[1.0 if x == y else pairs.get((x, y), pairs.get((y, x), 0.0)) for y in NAMES] for x in NAMES]
    return Gradients(NAMES, [metrics[f"term/{name}/grad_norm_weighted"] for name in NAMES], cosines)


@given(st.integers(0, 2**16), st.floats(0.0, 10.0), st.floats(0.01, 5), st.floats(0.01, 5))
def test_a_response_matches_linearizing_with_the_weight(seed, factor, weight_a, weight_b):
    generator = torch.Generator().manual_seed(seed)
    rows = [Evaluation(name, 1.0, torch.randn(6, generator=generator, dtype=torch.float64)) for name in NAMES]
    before = linearize(rows[0], [(rows[1], weight_a), (rows[2], weight_b)])
    after = linearize(rows[0], [(rows[1], weight_a * factor), (rows[2], weight_b)])
    response = respond(gradients_of(before.metrics), "a", factor)
    total_DT = -after.loss_weights_DT
    cosine = torch.nn.functional.cosine_similarity(total_DT, rows[0].gradient_DT, dim=0).item()
    assert response.share == pytest.approx(after.metrics["term/a/grad_share"])
    assert response.cosine_to_base == pytest.approx(cosine, abs=1e-6)
    assert response.norm == pytest.approx((total_DT.norm() / before.loss_weights_DT.norm()).item(), rel=1e-6)
    half = factor_of_half(gradients_of(before.metrics), "a")
    assert respond(gradients_of(before.metrics), "a", half).share == pytest.approx(0.5)


def test_a_term_without_gradient_never_reaches_half():
    gradients = Gradients(("base", "a"), (1.0, 0.0), ((1.0, 0.0), (0.0, 1.0)))
    assert factor_of_half(gradients, "a") == math.inf
    assert respond(gradients, "a", 10.0).share == 0.0
    assert respond(Gradients(("base",), (0.0,), ((1.0,),)), "base", 2.0).cosine_to_base == 0.0

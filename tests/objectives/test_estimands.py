"""Estimators against the exact gradients of their estimands, by enumerating every sequence of a toy model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.toy_sequences import (
    NUM_PROMPTS,
    SEQUENCES,
    divergence_gradient,
    draw_logits,
    expected_score_gradient,
    make_case,
    row_logprobs,
    sample_rows,
    scores_of,
    sequence_logprobs,
)
from objectives import Objective, ObjectiveError
from objectives.config.term_lookup import find_term
from objectives.estimators import choose_estimator, minimum_risk, minimum_risk_mean, score_function
from objectives.reductions import sum_by_datum

OFFSETS = (0.0, 1.0, 5.0)


def assert_close(gradient: Tensor, expected: Tensor, *, cosine: float, norm: float) -> None:
    flat, exact = gradient.flatten(), expected.flatten()
    assert float(flat @ exact / flat.norm() / exact.norm()) >= cosine
    assert float(flat.norm() / exact.norm()) == pytest.approx(1, rel=norm)


def test_the_toy_is_a_distribution():
    total = sum(float(logprobs_T.sum().exp()) for logprobs_T in sequence_logprobs(draw_logits(0), 0, SEQUENCES))
    assert total == pytest.approx(1)


@pytest.mark.parametrize("sampler_seed", [0, 1], ids=["on-policy", "stale"])
def test_the_score_function_estimates_the_gradient_of_the_expected_score(sampler_seed):
    logits = draw_logits(0)
    sampler = draw_logits(0) if sampler_seed == 0 else draw_logits(0) + 0.3 * draw_logits(1)
    expected = expected_score_gradient(logits)
    generator = torch.Generator().manual_seed(7)
    sums = {offset: torch.zeros_like(logits) for offset in OFFSETS}
    num_batches = 40
    for _ in range(num_batches):
        rows = sample_rows(sampler, generator, 128)
        current = logits.clone().requires_grad_()
        batch, outputs = make_case(current, sampler, rows)
        assert choose_estimator(batch).estimator == "score_function"
        for offset in OFFSETS:
            value = score_function(outputs, batch, scores_of(rows, offset))
            sums[offset] += torch.autograd.grad(value, current, retain_graph=True)[0] / num_batches
    for offset in OFFSETS:
        assert_close(sums[offset], expected, cosine=0.99, norm=0.05)
        torch.testing.assert_close(sums[offset], sums[0.0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("offset", OFFSETS)
def test_minimum_risk_over_all_sequences_is_the_gradient_of_the_expected_score(offset):
    logits = draw_logits(0).requires_grad_()
    rows = [(prompt, sequence) for prompt in range(NUM_PROMPTS) for sequence in SEQUENCES]
    batch, outputs = make_case(logits, None, rows)
    assert choose_estimator(batch).estimator == "minimum_risk"
    (gradient,) = torch.autograd.grad(minimum_risk(outputs, batch, scores_of(rows, offset)), logits)
    assert_close(gradient, expected_score_gradient(logits.detach()), cosine=1 - 1e-12, norm=1e-9)


@pytest.mark.parametrize(("estimator", "mean"), [(minimum_risk, False), (minimum_risk_mean, True)])
@pytest.mark.parametrize("offset", OFFSETS)
def test_minimum_risk_over_some_candidates_is_exact_for_the_renormalized_model(offset, estimator, mean):
    candidates = SEQUENCES[::97]
    logits = draw_logits(3).requires_grad_()
    rows = [(prompt, sequence) for sequence in candidates for prompt in range(NUM_PROMPTS)]
    batch, outputs = make_case(logits, None, rows)
    value = estimator(outputs, batch, scores_of(rows, offset), alpha=0.5)
    (gradient,) = torch.autograd.grad(value, logits)
    expected = expected_score_gradient(logits.detach(), candidates, 0.5, mean=mean)
    assert_close(gradient, expected, cosine=1 - 1e-12, norm=1e-9)


def test_a_single_completion_of_a_prompt_has_no_gradient_and_no_estimator():
    logits = draw_logits(0).requires_grad_()
    rows = [(prompt, SEQUENCES[prompt + 9]) for prompt in range(NUM_PROMPTS)]
    batch, outputs = make_case(logits, None, rows)
    choice = choose_estimator(batch)
    assert (choice.estimator, choice.reason) == (None, "every prompt of the data has one completion")
    for estimator in (minimum_risk, minimum_risk_mean):
        (gradient,) = torch.autograd.grad(estimator(outputs, batch, scores_of(rows, 0.0)), logits, retain_graph=True)
        assert gradient.abs().max() < 1e-15


def test_an_objective_moves_terms_to_candidates_only_where_the_data_has_no_samples():
    rows = [(prompt, SEQUENCES[prompt + 9]) for prompt in range(NUM_PROMPTS)]
    terms = [
        {"name": "chosen", "fn": "length", "estimator": "score_function"},
        {"name": "open", "fn": "length"},
        {"name": "flags", "fn": "unlikely_tokens", "params": {"tokens": [1]}},
    ]
    fixed, _ = make_case(draw_logits(0), None, rows)
    objective = Objective(regularizers=terms)
    objective.check_needs(can_sample=True)
    reasons = objective.choose_estimators(fixed, can_sample=True)
    assert list(reasons) == ["open"]
    assert [(term.name, term.estimator) for term in objective.due(0, on_candidates=True)] == [
        ("chosen", "score_function"),
        ("open", "score_function"),
    ]
    assert [term.name for term in objective.due(0)] == ["flags"]
    assert not objective.has_open_choice
    with pytest.raises(ObjectiveError, match="'chosen' cannot run here: its estimator 'score_function' needs samples"):
        Objective(regularizers=terms).check_needs()

    sampled, _ = make_case(draw_logits(0), draw_logits(0), rows)
    on_samples = Objective(regularizers=terms)
    on_samples.choose_estimators(sampled)
    assert [term.name for term in on_samples.due(0)] == ["chosen", "open", "flags"]
    assert not on_samples.has_open_choice
    resumed = Objective(regularizers=terms)
    resumed.restore(on_samples.state())
    assert not resumed.has_open_choice
    on_samples.restore({})
    assert on_samples.state() == Objective(regularizers=terms).state(), "an empty state resets the chosen estimators"


STALE = [pytest.param(0.0, id="on-policy"), pytest.param(0.3, id="stale")]


def expected_gradient(name: str, staleness: float, **params: str) -> Tensor:
    """Expectation of a term's gradient over all sequences of the sampler, summed over tokens, mean over prompts."""
    logits = draw_logits(0).requires_grad_()
    sampler = draw_logits(0) + staleness * draw_logits(1)
    rows = [(prompt, sequence) for prompt in range(NUM_PROMPTS) for sequence in SEQUENCES]
    batch, outputs = make_case(logits, sampler, rows)
    outputs = replace(outputs, ref_logprobs_DT=row_logprobs(draw_logits(2), rows))
    values_DT, _ = find_term(name)(outputs, batch, **params)
    assert outputs.sampling_logprobs_DT is not None
    probs_D = sum_by_datum(outputs.sampling_logprobs_DT, batch).exp() / NUM_PROMPTS
    return torch.autograd.grad((probs_D * sum_by_datum(values_DT, batch)).sum(), logits)[0]


@pytest.mark.parametrize("staleness", STALE)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("direction", ["reverse", "forward", "symmetric"])
def test_kl_has_the_gradient_of_the_divergence_between_completions(direction, estimator, staleness):
    reverse, forward = (divergence_gradient(draw_logits(0), draw_logits(2), forward=way) for way in (False, True))
    exact = {"reverse": reverse, "forward": forward, "symmetric": (reverse + forward) / 2}[direction]
    gradient = expected_gradient("kl", staleness, estimator=estimator, direction=direction)
    assert_close(gradient, exact, cosine=1 - 1e-9, norm=1e-6)


@pytest.mark.parametrize("staleness", STALE)
def test_kl_unweighted_has_another_gradient(staleness):
    exact = divergence_gradient(draw_logits(0), draw_logits(2))
    gradient = expected_gradient("kl_unweighted", staleness)
    flat = gradient.flatten() @ exact.flatten() / gradient.norm() / exact.norm()
    assert flat < 0.99 or abs(gradient.norm() / exact.norm() - 1) > 0.1


def test_kl_on_fixed_data_is_unweighted():
    rows = [(prompt, sequence) for prompt in range(NUM_PROMPTS) for sequence in SEQUENCES[:5]]
    batch, outputs = make_case(draw_logits(0), None, rows)
    outputs = replace(outputs, ref_logprobs_DT=row_logprobs(draw_logits(2), rows))
    weighted, unweighted = (find_term(name)(outputs, batch) for name in ("kl", "kl_unweighted"))
    torch.testing.assert_close(weighted[0], unweighted[0])
    assert weighted[1].keys() == unweighted[1].keys()

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import datums, make_batch, ragged

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.estimators import minimum_risk, minimum_risk_mean, score_function, unlikelihood
from objectives.labels import NONE
from objectives.reductions import reduce


def random_scores(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


REDUCTIONS = {minimum_risk: sum, minimum_risk_mean: fmean}


@pytest.mark.parametrize("estimator", REDUCTIONS)
@given(case=ragged(), alpha=st.floats(0.1, 3))
def test_risk_equals_a_plain_loop_over_prompts(estimator, case, alpha):
    batch, outputs = case
    prompts_D = torch.arange(batch.num_datums) % 2
    batch = replace(batch, labels_D={"prompt": prompts_D})
    scores_D = random_scores(batch.num_datums)
    risks = []
    for prompt in (0, 1):
        completions = [
            (math.exp(alpha * REDUCTIONS[estimator](logprobs_T)), float(score))
            for logprobs_T, score, number in zip(
                datums(outputs.logprobs_DT, batch), scores_D, prompts_D.tolist(), strict=True
            )
            if logprobs_T and number == prompt
        ]
        if completions:
            risks.append(sum(p * score for p, score in completions) / sum(p for p, _ in completions))
    assert estimator(outputs, batch, scores_D, alpha=alpha).item() == pytest.approx(fmean(risks))


@pytest.mark.parametrize("estimator", REDUCTIONS)
@given(case=ragged())
def test_risk_gradient(estimator, case):
    batch, outputs = case
    scores_D = random_scores(batch.num_datums)
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimator(Outputs(x), batch, scores_D, alpha=0.5), logprobs_DT)


@given(ragged())
def test_minimum_risk_stays_between_the_scores_and_falls_along_its_gradient(case):
    batch, outputs = case
    scores_D = random_scores(batch.num_datums)
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    before = minimum_risk(Outputs(logprobs_DT), batch, scores_D)
    (gradient_DT,) = torch.autograd.grad(before, logprobs_DT)
    after = minimum_risk(Outputs(logprobs_DT - 0.1 * gradient_DT), batch, scores_D)
    assert scores_D.min() - 1e-12 <= after <= before + 1e-12 <= scores_D.max() + 2e-12


@given(ragged())
def test_score_function_gradient(case):
    batch, outputs = case
    scores_D = random_scores(batch.num_datums)
    sampling_DT = outputs.logprobs_DT + 0.1 * torch.sin(torch.arange(batch.num_tokens))
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: score_function(Outputs(x, sampling_logprobs_DT=sampling_DT), batch, scores_D), logprobs_DT
    )


def test_on_policy_score_function_is_reinforce_with_leave_one_out_baseline():
    batch, outputs = make_batch([2, 1, 3])
    scores_D = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64)
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    estimate = score_function(Outputs(logprobs_DT, sampling_logprobs_DT=logprobs_DT.detach()), batch, scores_D)
    (gradient_DT,) = torch.autograd.grad(estimate, logprobs_DT)
    advantages = [1 - (0 + 4) / 2, 0 - (1 + 4) / 2, 4 - (1 + 0) / 2]
    assert estimate.item() == pytest.approx(scores_D.mean().item())
    assert gradient_DT.tolist() == pytest.approx([advantages[d] / 3 for d in (0, 0, 1, 2, 2, 2)])


@pytest.mark.parametrize(
    ("members", "baselines"), [([NONE, NONE, NONE], [2.0, 2.5, 0.5]), ([7, 7, NONE], [4.0, 4.0, 0.5])]
)
def test_datums_without_a_member_are_conversations_of_their_own(members, baselines):
    batch, outputs = make_batch([2, 1, 3])
    batch = replace(batch, labels_D={**batch.labels_D, "member": torch.tensor(members)})
    scores_D = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64)
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    estimate = score_function(Outputs(logprobs_DT, sampling_logprobs_DT=logprobs_DT.detach()), batch, scores_D)
    (gradient_DT,) = torch.autograd.grad(estimate, logprobs_DT)
    advantages = [score - baseline for score, baseline in zip(scores_D.tolist(), baselines, strict=True)]
    assert gradient_DT.tolist() == pytest.approx([advantages[d] / 3 for d in (0, 0, 1, 2, 2, 2)])


def test_score_function_is_unbiased_over_every_pair_of_samples():
    """Exact mean gradient by logits over all pairs of samples from a vocabulary of three tokens."""
    batch, _ = make_batch([1, 1])
    token_scores = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    sampler = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((logits.softmax(0) * token_scores).sum(), logits)
    mean_value, mean_gradient = 0.0, torch.zeros(3, dtype=torch.float64)
    for pair in itertools.product(range(3), repeat=2):
        drawn = torch.tensor(pair)
        outputs = Outputs(logits.log_softmax(0)[drawn], sampling_logprobs_DT=sampler.log()[drawn])
        estimate = score_function(outputs, batch, token_scores[drawn])
        chance = sampler[drawn].prod()
        mean_value += float(chance * estimate.detach())
        mean_gradient += chance * torch.autograd.grad(estimate, logits)[0]
    assert mean_value == pytest.approx((logits.softmax(0) * token_scores).sum().item())
    assert mean_gradient.tolist() == pytest.approx(expected.tolist())


def test_an_importance_ratio_that_overflows_needs_an_advantage():
    """Equal scores have no advantage; in float64, the ratio is finite."""
    for dtype, scores in ((torch.float32, [2.0, 2.0]), (torch.float64, [2.0, 2.0]), (torch.float64, [2.0, 3.0])):
        batch = Batch(
            torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 1, 2]), labels_D={"prompt": torch.tensor([0, 0])}
        )
        leaf = torch.tensor([-1.0, -1.0], dtype=dtype, requires_grad=True)
        outputs = Outputs(leaf, sampling_logprobs_DT=torch.tensor([-100.0, -1.0], dtype=dtype))
        value = score_function(outputs, batch, torch.tensor(scores, dtype=dtype))
        gradient = torch.autograd.grad(value, leaf)[0]
        assert gradient.isfinite().all()
        assert bool(gradient.any()) == (scores[0] != scores[1])


def test_score_function_on_fixed_data_suggests_the_other_estimators():
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match="use 'auto', 'minimum_risk' or 'unlikelihood'"):
        score_function(outputs, batch, torch.zeros(1))


@given(ragged())
def test_unlikelihood_equals_its_formula_and_its_gradient_is_checked(case):
    batch, outputs = case
    scores_DT = random_scores(batch.num_tokens)
    expected = [
        score * -math.log(1 - math.exp(lp))
        for lp, score in zip(outputs.logprobs_DT.tolist(), scores_DT.tolist(), strict=True)
    ]
    assert unlikelihood(outputs, batch, scores_DT).tolist() == pytest.approx(expected)
    logprobs_DT = outputs.logprobs_DT.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: reduce(unlikelihood(Outputs(x), batch, scores_DT), batch, "token_mean"), logprobs_DT
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unlikelihood_of_a_certain_token_has_a_large_finite_gradient(dtype):
    batch, outputs = make_batch([4])
    logprobs_DT = torch.tensor([-1e-3, -1e-4, -1e-9, 0.0], dtype=dtype, requires_grad=True)
    value_DT = unlikelihood(replace(outputs, logprobs_DT=logprobs_DT), batch, torch.ones(4, dtype=dtype))
    (gradient_DT,) = torch.autograd.grad(value_DT.sum(), logprobs_DT)
    assert value_DT.isfinite().all()
    assert value_DT.diff().min() > 0
    assert gradient_DT.tolist() == pytest.approx([999.5, 9999.0, 9999.0, 9999.0], rel=1e-2)


def test_the_tangent_joins_smoothly():
    batch, outputs = make_batch([1])
    ones = torch.ones(1, dtype=torch.float64)
    bend = torch.tensor([math.log1p(-1e-4)], dtype=torch.float64)
    below, above = (unlikelihood(replace(outputs, logprobs_DT=bend + d), batch, ones).item() for d in (-1e-9, 1e-9))
    assert above - below == pytest.approx(2e-9 * 9999, rel=1e-3)


def test_the_gradient_of_a_rare_token_is_not_lost_in_float32():
    lp = torch.tensor([-9.0], requires_grad=True)
    batch, _ = make_batch([1])
    (slope,) = torch.autograd.grad(unlikelihood(Outputs(lp), batch, torch.ones(1)).sum(), lp)
    assert slope.item() == pytest.approx(math.exp(-9) / -math.expm1(-9), rel=1e-2)

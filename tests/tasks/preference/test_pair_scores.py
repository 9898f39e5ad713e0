"""Scores of held-out pairs, against DPO's margin from the sums of the logprobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from scipy.stats import binomtest

from objectives.batch import Batch, Outputs, pack
from objectives.evaluate import evaluate_term
from objectives.objective import Objective
from objectives.term import regularizer
from tasks.preference.pair_source import HeldOutPairs
from tasks.reports.tables import Estimate
from tasks.training.held_out import MAX_SCORES, BatchValues

BETA = 0.2


def make_pairs(num_pairs: int, *, unrelated: bool = False) -> Any:
    """Pairs whose completions have two to four tokens; the rejected one comes first in every other pair."""
    lengths_D = [2 + number % 3 for number in range(2 * num_pairs)]
    _, offsets_D = pack([torch.zeros(length) for length in lengths_D])
    num = int(offsets_D[-1])
    desirable_D = torch.tensor([int(number % 4 in (0, 3)) for number in range(2 * num_pairs)])
    labels = {"pair": torch.arange(num_pairs).repeat_interleave(2), "desirable": desirable_D}
    batch = Batch(torch.arange(num), torch.ones(num), offsets_D, labels_D=labels)
    return SimpleNamespace(batch=lambda indices: batch, comparisons=range(num_pairs), unrelated=unrelated)


def loss(name: str, **params: float) -> Any:
    return Objective(base_loss={"name": name, "params": params}).base


def outputs(batch: Batch) -> Outputs:
    generator = torch.Generator().manual_seed(0)
    policy_DT, reference_DT = (-torch.rand(batch.num_tokens, generator=generator) for _ in range(2))
    return Outputs(policy_DT, ref_logprobs_DT=reference_DT)


@pytest.mark.parametrize("num_pairs", [1, 7, MAX_SCORES + 37])
def test_the_scores_are_those_of_the_pairs_and_average_to_the_metric(num_pairs: int) -> None:
    pairs = make_pairs(num_pairs)
    batch: Batch = pairs.batch(())
    held_out, measured = HeldOutPairs(pairs, loss("dpo", beta=BETA), cast(Any, None)), outputs(pairs.batch(()))
    scores, sizes = held_out._scores(measured)
    rewards_D = []
    for start, end in zip(batch.offsets_D[:-1].tolist(), batch.offsets_D[1:].tolist(), strict=True):
        assert measured.ref_logprobs_DT is not None
        rewards_D.append(BETA * float((measured.logprobs_DT - measured.ref_logprobs_DT)[start:end].sum()))
    signs = [1 if desirable else -1 for desirable in batch.labels_D["desirable"].tolist()]
    margins_P = [
        signs[2 * pair] * rewards_D[2 * pair] + signs[2 * pair + 1] * rewards_D[2 * pair + 1]
        for pair in range(num_pairs)
    ]
    expected = {"test/accuracy": [float(margin > 0) for margin in margins_P], "test/margin": margins_P}
    whole = evaluate_term(loss("dpo", beta=BETA), measured, batch, first_step=False).metrics
    for name, values_P in expected.items():
        if num_pairs <= MAX_SCORES:
            assert scores[name] == pytest.approx(values_P, abs=1e-6)
        assert len(scores[name]) == min(num_pairs, MAX_SCORES)
        assert sum(sizes) == num_pairs
        mean, _ = BatchValues(scores[name], sizes).mean()
        assert mean == pytest.approx(sum(values_P) / num_pairs, abs=1e-6)
        assert mean == pytest.approx(whole[name.removeprefix("test/")], abs=1e-6)


@pytest.mark.parametrize("name", ["ipo", "simpo", "orpo", "bradley_terry"])
def test_the_scores_of_every_pair_loss_average_to_the_metric(name: str) -> None:
    pairs = make_pairs(MAX_SCORES + 37)
    batch: Batch = pairs.batch(())
    scores, sizes = HeldOutPairs(pairs, loss(name), cast(Any, None))._scores(outputs(batch))
    whole = evaluate_term(loss(name), outputs(batch), batch, first_step=False).metrics
    means = {key.removeprefix("test/"): BatchValues(values, sizes).mean()[0] for key, values in scores.items()}
    assert means == pytest.approx({key: whole[key] for key in ("accuracy", "margin")}, abs=1e-6)


@pytest.mark.parametrize("is_right", [True, False])
def test_the_accuracy_of_many_pairs_has_wilsons_interval(is_right: bool) -> None:
    """Groups of pairs differ in size, but 237 right pairs are right in every group."""
    num_pairs = MAX_SCORES + 37
    pairs = make_pairs(num_pairs)
    batch: Batch = pairs.batch(())
    held_out = HeldOutPairs(pairs, loss("dpo", beta=BETA), cast(Any, None))
    sign = 1 if is_right else -1
    logprobs_DT = batch.labels_D["desirable"].repeat_interleave(batch.offsets_D.diff()) * sign * 1.0
    scores, sizes = held_out._scores(Outputs(logprobs_DT, ref_logprobs_DT=torch.zeros(batch.num_tokens)))
    bounds = Estimate.of(BatchValues(scores["test/accuracy"], sizes), is_share=True).bounds
    expected = binomtest(num_pairs if is_right else 0, num_pairs).proportion_ci(method="wilson")
    assert bounds == pytest.approx((expected.low, expected.high), abs=5e-4)


def test_losses_that_compare_a_batch_have_no_scores_of_pairs() -> None:
    @regularizer("test_own_preference_loss")
    def own_loss(outputs: Outputs, batch: Batch) -> torch.Tensor:
        return -outputs.logprobs_DT

    assert HeldOutPairs(make_pairs(2), loss("test_own_preference_loss"), cast(Any, None)).scored_metrics == ()
    assert HeldOutPairs(make_pairs(2, unrelated=True), loss("kto"), cast(Any, None)).scored_metrics == ()

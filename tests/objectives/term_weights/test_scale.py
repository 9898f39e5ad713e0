"""Weights with a stable meaning: batch size, lengths and minibatches change no term's share of the gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from objectives import (
    Batch,
    Objective,
    Outputs,
    evaluate_base,
    evaluate_term,
    linearize,
    prepare_features,
    regularizer,
)
from objectives.batch import pack
from objectives.execution.term_loop import StepPosition, evaluate_terms, prepare_terms
from objectives.gradients.linearize import Linearized, WeightedTerm, join_metrics, measure_effects
from objectives.sdk.training_loop import ThreadTermExecutor
from objectives.term_weights.scale import candidate_scale

LENGTHS = (5, 9, 4, 12, 7, 3, 8, 6)
FIXED = [{"name": "confidence"}, {"name": "length", "params": {"free": 2, "buffer": 8}}, {"name": "logic"}]
SAMPLED = [*FIXED, {"name": "kl", "weight": 0.3}, {"name": "kl_unweighted", "weight": 0.3}]
CASES = {
    "cross entropy": ("cross_entropy", FIXED),
    "policy loss": ("importance_sampling", SAMPLED),
    "policy loss that is a mean": ("dr_grpo", SAMPLED),
    "policy loss with a bonus": ({"name": "enhanced_ppo", "params": {"value_coeff": 0.0}}, SAMPLED),
    "policy loss with a cutoff": ("conservative_ppo", SAMPLED),
    "preferences": ("dpo", [*FIXED, {"name": "simpo"}]),
}


def make_rows(copies: int, stretch: int = 1) -> tuple[Batch, Outputs]:
    """Eight completions of four prompts, repeated; each copy has prompts, pairs and groups of its own."""
    lengths = [length * stretch for length in LENGTHS] * copies
    offsets_D = pack([torch.empty(length) for length in lengths])[1]
    generator = torch.Generator().manual_seed(0)
    unit = [torch.rand((LENGTHS[d], 4), generator=generator, dtype=torch.float64) for d in range(8)]
    rows = torch.cat([unit[d % 8].repeat(stretch, 1) for d in range(len(lengths))])
    texts = tuple(f"<<1+1={d % 3}>>" for d in range(8)) * copies
    labels = torch.arange(4).repeat_interleave(2)
    labels = torch.cat([labels + 4 * copy for copy in range(copies)])
    advantages = torch.cat([torch.full((length,), (-1.0) ** d) for d, length in enumerate(lengths)])
    batch = Batch(
        torch.zeros(len(rows), dtype=torch.int64),
        torch.ones(len(rows)),
        offsets_D,
        texts,
        advantages_DT=advantages,
        labels_D={"prompt": labels, "pair": labels},
    )
    logprobs_DT = -0.05 - 2 * rows[:, 0]
    return batch, Outputs(logprobs_DT, logprobs_DT + 0.2 * (rows[:, 1] - 0.5), logprobs_DT + 0.02 * (rows[:, 2] - 0.5))


def linearized(case: str, batch: Batch, outputs: Outputs, share: float = 1.0) -> Linearized:
    base_loss, terms = CASES[case]
    objective = Objective(base_loss, terms)
    if "policy" in case:
        batch = replace(batch, sampling_logprobs_DT=outputs.sampling_logprobs_DT)
    scale = objective.scale(batch, share)
    rows = []
    for term in objective.regularizers:
        features = prepare_features(term, batch)
        evaluation = evaluate_term(term, outputs, replace(batch, features=features), True)
        rows.append(WeightedTerm(evaluation, term.weight_at(0, 1), scale.of(term, batch)))
    return linearize(evaluate_base(objective.base, outputs, batch), rows, scale=scale)


def shares(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.endswith("/grad_share")}


@pytest.mark.parametrize("case", CASES)
def test_the_share_of_a_term_does_not_depend_on_the_number_of_rows(case):
    small, large = (linearized(case, *make_rows(copies)).metrics for copies in (1, 16))
    assert min(shares(small).values()) > 0.001, "every term trains"
    assert shares(large) == pytest.approx(shares(small), rel=0.05)
    assert large["loss/total"] == pytest.approx(small["loss/total"], rel=0.05)


@pytest.mark.parametrize("case", ["cross entropy", "policy loss", "policy loss that is a mean"])
def test_the_share_of_a_term_does_not_depend_on_the_lengths(case):
    """A completion that is repeated has the same value per token.

    The length term has other scores and is left out, and so is `kl` on samples: a token also pays for later ones.
    """
    short, long = (linearized(case, *make_rows(4, stretch)).metrics for stretch in (1, 4))
    for name in ("confidence", "kl_unweighted"):
        if f"term/{name}/grad_share" in short:
            ratio = short[f"term/{name}/grad_norm_weighted"] / short["term/base/grad_norm_weighted"]
            ratio_long = long[f"term/{name}/grad_norm_weighted"] / long["term/base/grad_norm_weighted"]
            assert ratio_long == pytest.approx(ratio, rel=0.05), name


def test_a_score_per_completion_has_the_same_strength_at_each_token_for_any_length():
    """On-policy, a score's gradient per token is the advantage, next to the base loss's weight of 1."""
    strengths = []
    for stretch in (1, 4):
        batch, outputs = make_rows(1, stretch)
        batch = replace(batch, sampling_logprobs_DT=outputs.logprobs_DT)
        outputs = replace(outputs, sampling_logprobs_DT=outputs.logprobs_DT)
        objective = Objective(regularizers=[{"name": "logic"}])
        (term,) = objective.regularizers
        features = prepare_features(term, batch)
        gradient_DT = evaluate_term(term, outputs, replace(batch, features=features), True).gradient_DT
        strengths.append(float((gradient_DT * objective.factors(batch, 0, 1)(term)).abs().max()))
    assert strengths == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("case", CASES)
def test_minibatches_train_the_same_update_and_report_its_norms(case):
    batch, outputs = make_rows(4)
    whole = linearized(case, batch, outputs)
    quarter, quarter_outputs = make_rows(1)
    parts = [linearized(case, quarter, quarter_outputs, share=0.25) for _ in range(4)]
    sent = torch.cat([part.loss_weights_DT for part in parts])
    torch.testing.assert_close(sent, whole.loss_weights_DT, rtol=1e-9, atol=1e-12)
    joined = join_metrics(parts)
    compared = [key for key in whole.metrics if not key.endswith("duration_s")]
    assert {key: joined[key] for key in compared if "tokens_max" not in key} == pytest.approx(
        {key: whole.metrics[key] for key in compared if "tokens_max" not in key}
        | {key: joined[key] for key in compared if key.count("/") == 2 and _is_count(key)}
    )


def cut(batch: Batch, outputs: Outputs, rows: slice) -> tuple[Batch, Outputs]:
    """Some rows of a batch of samples, with a critic's values."""
    bounds = batch.offsets_D[rows.start : rows.stop + 1]
    tokens = slice(int(bounds[0]), int(bounds[-1]))
    fields = {
        name: getattr(outputs, name)[tokens] for name in ("logprobs_DT", "ref_logprobs_DT", "sampling_logprobs_DT")
    }
    part = Batch(
        batch.target_tokens_DT[tokens],
        batch.weights_DT[tokens],
        bounds - bounds[0],
        advantages_DT=batch.advantages_DT[tokens],
        sampling_logprobs_DT=fields["sampling_logprobs_DT"],
        values_DT=torch.zeros(tokens.stop - tokens.start),
        returns_DT=torch.linspace(0, 1, batch.num_tokens)[tokens],
    )
    return part, Outputs(**fields)


def test_metrics_per_token_of_unequal_minibatches_are_those_of_the_whole_batch():
    batch, outputs = make_rows(1)
    objective = Objective("enhanced_ppo")

    def linear(rows: slice) -> Linearized:
        part, part_outputs = cut(batch, outputs, rows)
        return linearize(evaluate_base(objective.base, part_outputs, part), [], scale=objective.scale(part, 0.5))

    whole = linear(slice(0, 8)).metrics
    joined = join_metrics([linear(slice(0, 1)), linear(slice(1, 8))])
    names = ("policy", "entropy", "kl_ref", "critic_error", "ratio_max")
    assert {name: joined[f"term/base/{name}"] for name in names} == pytest.approx(
        {name: whole[f"term/base/{name}"] for name in names}
    )
    p, q = outputs.logprobs_DT, outputs.sampling_logprobs_DT
    ratio = (p - q).exp()
    surrogate = torch.minimum(ratio * batch.advantages_DT, ratio.clamp(0.8, 1.2) * batch.advantages_DT)
    assert joined["term/base/policy"] == pytest.approx(-float(surrogate.mean()))


def plain_enhanced_ppo(p: torch.Tensor, q: torch.Tensor, ref: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = p.exp() / q.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (-surrogate + 0.01 * ratio * p + 0.05 * ratio * (ref.exp() / p.exp() - 1 + p - ref)).sum()


def plain_conservative_ppo(
    p: torch.Tensor, q: torch.Tensor, _ref: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """The divergence is below the cutoff."""
    ratio = p.exp() / q.exp()
    return (-ratio * advantages + ratio - 1 - ratio.log()).sum()


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("case", "plain_loss"),
    [("policy loss with a bonus", plain_enhanced_ppo), ("policy loss with a cutoff", plain_conservative_ppo)],
)
def test_minibatches_of_a_sum_over_tokens_train_the_gradient_of_the_whole_batch(case, plain_loss, num_minibatches):
    batch, outputs = make_rows(4)
    p = outputs.logprobs_DT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        plain_loss(p, outputs.sampling_logprobs_DT, outputs.ref_logprobs_DT, batch.advantages_DT), p
    )
    part, part_outputs = make_rows(4 // num_minibatches)
    objective = Objective(CASES[case][0])
    part = replace(part, sampling_logprobs_DT=part_outputs.sampling_logprobs_DT)
    base = evaluate_base(objective.base, part_outputs, part)
    sent = linearize(base, [], scale=objective.scale(part, 1 / num_minibatches)).loss_weights_DT
    torch.testing.assert_close(sent.repeat(num_minibatches), -gradient, rtol=1e-6, atol=1e-6)


def _is_count(key: str) -> bool:
    """A term's own metrics that count over a batch are averaged over minibatches."""
    return key.rpartition("/")[2] in ("checked", "violated", "undecided", "unparsable")


def test_norms_of_minibatches_with_opposite_gradients_are_those_of_the_update():
    """Averages of the two norms and cosines would be 5 and 0."""
    batch, outputs = make_rows(1)
    half = Objective(regularizers=[{"name": "confidence"}])
    parts = []
    for rows in (slice(0, 4), slice(4, 8)):
        bounds = batch.offsets_D[rows.start : rows.stop + 1]
        tokens = slice(int(bounds[0]), int(bounds[-1]))
        piece = Batch(batch.target_tokens_DT[tokens], batch.weights_DT[tokens], bounds - bounds[0], batch.texts_D[rows])
        piece_outputs = Outputs(outputs.logprobs_DT[tokens])
        term = evaluate_term(half.regularizers[0], piece_outputs, piece, True)
        row = WeightedTerm(term, 2.0, half.scale(piece).token)
        parts.append(linearize(evaluate_base(None, piece_outputs, piece), [row], scale=half.scale(piece)))
    metrics = join_metrics(parts)
    num_tokens = batch.num_tokens
    p = outputs.logprobs_DT.exp()
    gradient_DT = p * (outputs.logprobs_DT + 1) / num_tokens  # d (p log p) / d log p, mean over all tokens
    assert metrics["term/confidence/grad_norm"] == pytest.approx(float(gradient_DT.norm()), rel=1e-6)
    assert metrics["term/confidence/grad_norm_weighted"] == pytest.approx(2 * float(gradient_DT.norm()), rel=1e-6)
    base_DT = -torch.ones(num_tokens, dtype=torch.float64) / num_tokens
    cosine = float(gradient_DT @ base_DT / gradient_DT.norm() / base_DT.norm())
    assert metrics["term/confidence/cosine_to_base"] == pytest.approx(cosine, rel=1e-6)
    assert metrics["term/confidence/value"] == pytest.approx(float((p * outputs.logprobs_DT).mean()), rel=1e-6)
    assert metrics["loss/base"] == pytest.approx(-float(outputs.logprobs_DT.mean()), rel=1e-6)
    assert metrics["loss/base_sum"] == pytest.approx(-float(outputs.logprobs_DT.sum()), rel=1e-6)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_sum_over_an_update_does_not_depend_on_its_minibatches(num_parts):
    """Value, contribution, norm and effect of a term with the reduction `sum`, against plain torch."""

    @regularizer("test_squared_logprobs", reduction="sum")
    def squared_logprobs(outputs, batch):
        return outputs.logprobs_DT**2

    objective = Objective(regularizers=[{"fn": squared_logprobs, "weight": 0.25}])
    logprobs_DT = -torch.arange(1.0, 9.0, dtype=torch.float64)
    change_DT = torch.linspace(-0.5, 1.0, 8, dtype=torch.float64)
    parts = []
    for piece_DT in logprobs_DT.chunk(num_parts):
        size = len(piece_DT)
        batch = Batch(torch.zeros(size).long(), torch.ones(size), torch.tensor([0, size]))
        position = StepPosition(0, 1, 1 / num_parts)
        with ThreadTermExecutor(objective) as executor:
            terms = prepare_terms(objective, batch, position, executor)
            parts.append(evaluate_terms(objective, terms, Outputs(piece_DT), batch, executor, position))
    metrics = join_metrics(parts)
    assert metrics["term/test_squared_logprobs/value"] == pytest.approx(float((logprobs_DT**2).sum()))
    assert metrics["term/test_squared_logprobs/contribution"] == pytest.approx(float((logprobs_DT**2).sum()) / 4 / 8)
    assert metrics["term/test_squared_logprobs/grad_norm"] == pytest.approx(float((2 * logprobs_DT).norm()))
    effects = measure_effects(parts, change_DT.chunk(num_parts))
    assert effects["term/test_squared_logprobs/effect"] == pytest.approx(float(2 * logprobs_DT @ change_DT))


@pytest.mark.parametrize("estimator", ["auto", "minimum_risk", "minimum_risk_mean"])
def test_scores_per_datum_are_means_with_any_reduction(estimator):
    @regularizer("test_summed_scores", "scored", reduction="sum")
    def summed_scores(outputs, batch):
        return [float(d) for d in range(batch.num_datums)]

    objective = Objective(
        regularizers=[{"name": "length", "estimator": estimator}, {"fn": summed_scores, "estimator": estimator}]
    )
    length, summed = objective.regularizers
    batch, _ = make_rows(1)
    for scale in (objective.scale(batch), candidate_scale(objective.scale(batch))):
        assert scale.of(summed, batch) == scale.of(length, batch) > 0

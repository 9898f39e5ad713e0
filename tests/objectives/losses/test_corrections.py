"""Corrections between sampler and trainer, against loops, TRL and an enumeration of a toy's completions."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import CodeType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer

from benchmarks.toy_sequences import (
    NUM_PROMPTS,
    SEQUENCES,
    draw_logits,
    expected_score_gradient,
    make_case,
    row_logprobs,
    score,
)
from objectives import Objective, ObjectiveError, evaluate_base
from objectives.losses.policy.correction import CORRECTABLE, Correction
from objectives.one_pass.fused import fuse, trace_base
from objectives.one_pass.planner import find_named_loss
from objectives.one_pass.traced import InputSignature, split_inputs
from objectives.reductions import sum_by_datum

CORRECTIONS = {
    "proximal": Correction(ratio="none"),
    "token truncated": Correction(ratio="token", high=1.3),
    "token masked": Correction(ratio="token", bound="mask", low=0.7, high=1.3),
    "sequence truncated": Correction(ratio="sequence", low=0.5, high=1.5),
    "sequence masked": Correction(ratio="sequence", bound="mask", high=1.2),
    "geometric mean": Correction(sequence_low=0.8, sequence_high=1.1),
    "off-policy": Correction(off_policy_above=0.05),
    "trust region": Correction(trust_region=0.1),
    "all": Correction("token", "mask", 0.2, 3.0, 0.5, 1.5, 0.1, 0.2),
}


def slow_factors(
    correction: Correction, p: list[float], q: list[float], advantages: list[float], s: list[float]
) -> list[float]:
    """Factors of one sequence, from the published formulas, token by token; s is that of the sampler's weights."""
    ratios = [math.exp(a - b) for a, b in zip(p, q, strict=True)]
    whole = math.prod(ratios)
    mean = whole ** (1 / len(ratios)) if ratios else 1.0
    divergence = sum(b - a for a, b in zip(p, s, strict=True)) / max(1, len(p))
    factors = []
    for a, b, ratio, advantage in zip(p, s, ratios, advantages, strict=True):
        weight = {"loss": 1.0, "none": 1.0, "token": ratio, "sequence": whole}[correction.ratio]
        if correction.ratio in ("token", "sequence"):
            if correction.bound == "truncate":
                weight = min(max(weight, correction.low), correction.high)
            elif not correction.low <= weight <= correction.high:
                weight = 0.0
        if mean < (correction.sequence_low or 0) or mean > (correction.sequence_high or math.inf):
            weight = 0.0
        if correction.off_policy_above is not None and advantage < 0 and divergence > correction.off_policy_above:
            weight = 0.0
        grows = (advantage > 0 and a > b) or (advantage < 0 and a < b)
        if correction.trust_region is not None and grows and abs(math.exp(a) - math.exp(b)) > correction.trust_region:
            weight = 0.0
        factors.append(weight)
    return factors


@st.composite
def samples(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs of trainer and sampler, advantages, and offsets of ragged sequences, empty ones included."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rows = torch.randn(3, sum(lengths), generator=generator, dtype=torch.float64)
    sampling = -0.1 - rows[0].abs()
    return sampling + 0.4 * rows[1], sampling, rows[2], torch.tensor([0, *lengths]).cumsum(0)


@given(samples(), st.sampled_from([None, 0.5, 2.0]))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_factors_equal_a_loop_over_tokens(name, case, power):
    """With a temperature, the distribution of the samples (q) is not that of the sampler's weights (s)."""
    p, q, advantages, offsets = case
    s = None if power is None else power * q
    factors = CORRECTIONS[name].factors(p, q, advantages, offsets, s).tolist()
    values = [p, q, advantages, q if s is None else s]
    expected = [
        factor
        for start, end in pairwise(offsets.tolist())
        for factor in slow_factors(CORRECTIONS[name], *(value[start:end].tolist() for value in values))
    ]
    assert factors == pytest.approx(expected)


@given(samples())
def test_the_off_policy_mask_is_that_of_trl(case):
    p, q, _, offsets = case
    for start, end in pairwise(offsets.tolist()):
        for advantage in (-1.0, 0.0, 1.0):
            part = slice(start, end)
            kept = GRPOTrainer.get_off_policy_mask(
                torch.tensor([[advantage]]), p[None, part], q[None, part], torch.ones(1, end - start), 0.05
            )
            whole = torch.full((end - start,), advantage)
            factors = CORRECTIONS["off-policy"].factors(p[part], q[part], whole, torch.tensor([0, end - start]))
            assert factors.tolist() == [kept.item()] * (end - start)


@cache
def importance_sampling_of_trl() -> CodeType:
    """Return the code of TRL that computes the ratios of sampler and trainer, a block of a method of `GRPOTrainer`."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    blocks = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "torch.exp" in ast.unparse(node)
    ]
    (block,) = blocks
    return compile(ast.Module([block], []), "trl", "exec")


@given(samples())
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.2), (0.7, 1.3)])
def test_ratios_of_tokens_and_sequences_are_those_of_trl(level, bound, low, high, case):
    p, q, advantages, offsets = case
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=f"{level}_{bound}",
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    lengths = offsets.diff().tolist()
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": pad_sequence([torch.ones(length) for length in lengths], batch_first=True),
        "old_per_token_logps": pad_sequence(list(p.split(lengths)), batch_first=True),
        "sampling_per_token_logps": pad_sequence(list(q.split(lengths)), batch_first=True),
    }
    exec(importance_sampling_of_trl(), names)
    mask = names["completion_mask"]
    expected = names["vllm_importance_sampling_ratio"].expand_as(mask)[mask.bool()]
    factors = Correction(ratio=level, bound=bound, low=low, high=high).factors(p, q, advantages, offsets)
    torch.testing.assert_close(factors, expected)


def policy_gradient(correction: Correction | None, base: str = "importance_sampling") -> Tensor:
    """Expected gradient of a base loss over all completions of a stale sampler, with scores as negative advantages."""
    logits = draw_logits(0).requires_grad_()
    sampler = draw_logits(0) + 0.3 * draw_logits(1)
    rows = [(prompt, sequence) for prompt in range(NUM_PROMPTS) for sequence in SEQUENCES]
    batch, outputs = make_case(logits.detach(), sampler, rows)
    assert outputs.sampling_logprobs_DT is not None
    probs_D = sum_by_datum(outputs.sampling_logprobs_DT, batch).exp() / NUM_PROMPTS
    lengths_D = batch.offsets_D.diff()
    scores_D = torch.tensor([score(*row) for row in rows], dtype=torch.float64)
    objective = Objective(base)
    objective.correct(correction)
    # The loss is proportional to the advantages, so they can carry the probability of the completion.
    batch = replace(batch, advantages_DT=(-probs_D * scores_D).repeat_interleave(lengths_D))
    gradient_DT = evaluate_base(objective.base, outputs, batch).gradient_DT
    return torch.autograd.grad(row_logprobs(logits, rows), logits, gradient_DT)[0]


def test_the_ratio_of_the_sequence_makes_the_policy_gradient_unbiased():
    exact = expected_score_gradient(draw_logits(0))
    unbounded = Correction(ratio="sequence", high=math.inf)
    torch.testing.assert_close(policy_gradient(unbounded), exact, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(policy_gradient(unbounded, "ppo"), exact, rtol=1e-5, atol=1e-8)
    for biased in (None, Correction(ratio="none"), Correction(ratio="token", high=math.inf)):
        assert (policy_gradient(biased) - exact).norm() > 0.05 * exact.norm()
    # One ratio per token: recomputed logprobs with an unbounded multiplier are the loss's own ratio.
    torch.testing.assert_close(policy_gradient(Correction(ratio="token", high=math.inf)), policy_gradient(None))


@pytest.mark.parametrize("base", sorted(CORRECTABLE - {"grpo", "dr_grpo", "dapo"}))
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("power", [None, 0.7])
def test_a_corrected_loss_in_one_pass_has_the_gradient_of_two_passes(name, base, power):
    """The service evaluates the loss datum by datum, without the offsets of the batch."""
    rows = [(prompt, SEQUENCES[index]) for prompt in range(NUM_PROMPTS) for index in (3, 200, 600)]
    batch, outputs = make_case(draw_logits(0), draw_logits(0) + 0.3 * draw_logits(1), rows)
    generator = torch.Generator().manual_seed(1)
    advantages_DT = torch.randn(batch.num_tokens, generator=generator)
    weights_DT = torch.ones(batch.num_tokens).index_fill(0, torch.tensor([0, 5]), 0.0)
    batch = replace(batch, advantages_DT=advantages_DT, weights_DT=weights_DT)
    if power is not None:
        batch = replace(batch, untempered_logprobs_DT=power * batch.sampling_logprobs_DT)
    objective = Objective(base)
    assert find_named_loss(objective) is not None
    objective.correct(CORRECTIONS[name])
    assert find_named_loss(objective) is None, "the service's loss has no correction"
    expected = evaluate_base(objective.base, outputs, batch)
    assert {"masked", "factor_mean"} <= expected.metrics.keys()

    signature = InputSignature.of(outputs, batch)
    loss = fuse(signature, trace_base(objective, outputs, batch), [])
    total, leaves = torch.zeros(()), []
    for inputs in split_inputs(outputs, batch):
        leaves.append(inputs["logprobs"].clone().requires_grad_())
        total = total + loss.function()(**{key: inputs[key] for key in loss.inputs} | {"logprobs": leaves[-1]})[0]
    assert total.item() == pytest.approx(expected.value, rel=1e-5)
    torch.testing.assert_close(
        torch.cat(torch.autograd.grad(total, leaves)), expected.gradient_DT, rtol=1e-5, atol=1e-7
    )
    objective.correct(None)
    assert find_named_loss(objective) is not None


def test_the_metrics_show_what_was_dropped():
    rows = [(0, SEQUENCES[200]), (1, SEQUENCES[600])]
    batch, outputs = make_case(draw_logits(0), draw_logits(1), rows)
    batch = replace(batch, advantages_DT=torch.tensor([1.0, -1.0, 0.0] + [1.0] * (batch.num_tokens - 3)))
    objective = Objective("ppo")
    objective.correct(correction := Correction(ratio="token", bound="mask", low=0.9, high=1.1))
    metrics = evaluate_base(objective.base, outputs, batch).metrics
    ratios = (outputs.logprobs_DT - outputs.sampling_logprobs_DT).exp()[batch.advantages_DT != 0].tolist()
    kept = [ratio for ratio in ratios if correction.low <= ratio <= correction.high]
    assert metrics["masked"] == pytest.approx(1 - len(kept) / len(ratios))
    assert metrics["factor_mean"] == pytest.approx(sum(kept) / len(ratios))
    assert metrics["clip_fraction"] == 0, "the ratio of the loss is 1"


def test_what_cannot_be_corrected_is_refused():
    for base in ("dro", "stable_reinforce", "conservative_ppo", "enhanced_ppo"):
        with pytest.raises(ObjectiveError, match=f"The loss '{base}' has a penalty that depends on the sampler"):
            Objective(base).correct(Correction())
    with pytest.raises(ObjectiveError, match="A correction needs a policy loss"):
        Objective().correct(Correction())
    Objective().correct(None)
    with pytest.raises(ObjectiveError, match=r"low=3 and high=2\.0; set 0 <= low <= high"):
        Correction(low=3.0)
    with pytest.raises(ObjectiveError, match="sequence_low=-1 and sequence_high=None"):
        Correction(sequence_low=-1.0)

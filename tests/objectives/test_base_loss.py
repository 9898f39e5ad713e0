"""Policy losses as base losses, compared with the service's losses over the trained tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from ragged_batches import make_batch, ragged

from objectives import (
    BaseLossSpec,
    Batch,
    Objective,
    ObjectiveError,
    ObjectiveSpec,
    Outputs,
    evaluate_base,
    evaluate_term,
    linearize,
)
from objectives.losses import BASE_LOSSES, CLIENT_SIDE

POLICY_LOSSES = [loss.name for loss in BASE_LOSSES.values() if loss.is_policy_loss]


def sampled(batch: Batch, outputs: Outputs) -> tuple[Batch, Outputs]:
    """Add sampling, reference and critic values; prompt tokens get arbitrary values."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    noise, away = 0.3 * torch.randn(2, batch.num_tokens, generator=generator, dtype=torch.float64)
    advantages_DT, values_DT, returns_DT = torch.randn(3, batch.num_tokens, generator=generator)
    sampling_DT = (outputs.logprobs_DT + noise).where(batch.mask_DT, 0.0)
    ref_DT = (outputs.logprobs_DT + away).where(batch.mask_DT, 0.0)
    batch = replace(batch, advantages_DT=advantages_DT.where(batch.mask_DT, 0.0))
    return replace(batch, values_DT=values_DT, returns_DT=returns_DT), replace(
        outputs, sampling_logprobs_DT=sampling_DT, ref_logprobs_DT=ref_DT
    )


@given(ragged())
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_prompt_tokens_are_ignored(name, case):
    """A batch with prompts has the loss and the gradient of the same batch without them."""
    batch, outputs = sampled(*case)
    mask = batch.mask_DT
    lengths = torch.stack([mask[batch.datum_of_DT == d].sum() for d in range(batch.num_datums)])
    assert batch.advantages_DT is not None
    assert batch.values_DT is not None
    assert batch.returns_DT is not None
    assert outputs.sampling_logprobs_DT is not None
    assert outputs.ref_logprobs_DT is not None
    without = Batch(
        batch.target_tokens_DT[mask],
        batch.weights_DT[mask],
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        advantages_DT=batch.advantages_DT[mask],
        values_DT=batch.values_DT[mask],
        returns_DT=batch.returns_DT[mask],
    )
    bare = Outputs(outputs.logprobs_DT[mask], outputs.ref_logprobs_DT[mask], outputs.sampling_logprobs_DT[mask])
    objective = Objective({"name": name})
    actual, expected = evaluate_base(objective.base, outputs, batch), evaluate_base(objective.base, bare, without)
    assert actual.value == pytest.approx(expected.value)
    assert actual.metrics == pytest.approx(expected.metrics)
    torch.testing.assert_close(actual.gradient_DT[mask], expected.gradient_DT)
    assert not actual.gradient_DT[~mask].any()


def test_ppo_by_hand():
    batch = Batch(
        torch.tensor([1, 2, 3]),
        torch.tensor([0.0, 1, 1]),
        torch.tensor([0, 3]),
        advantages_DT=torch.tensor([0.0, 2.0, -1.0]),
    )
    outputs = Outputs(
        torch.tensor([-1.0, -1.0, -1.0]),
        sampling_logprobs_DT=torch.tensor([0.0, -1.0 - math.log(1.5), -1.0 - math.log(1.1)]),
    )
    base = evaluate_base(Objective("ppo").base, outputs, batch)
    assert base.name == "base"
    assert base.value == pytest.approx(-(1.2 * 2 - 1.1))
    assert base.gradient_DT.tolist() == pytest.approx([0, 0, 1.1])
    assert base.metrics == pytest.approx(
        {"ratio_mean": 1.3, "ratio_max": 1.5, "kl_k1": -(math.log(1.5) + math.log(1.1)) / 2, "clip_fraction": 0.5}
    )
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    free = evaluate_base(Objective({"name": "ppo", "params": wide}).base, outputs, batch)
    assert free.value == pytest.approx(-(1.5 * 2 - 1.1))
    linear = linearize(free, [])
    assert linear.loss_weights_DT.tolist() == pytest.approx([0, 3.0, -1.1])
    assert linear.metrics["term/base/ratio_max"] == pytest.approx(1.5)


def test_a_spec_selects_the_loss_and_its_parameters():
    text = '{"base_loss": {"name": "dro", "params": {"beta": 0.5}}}'
    spec = ObjectiveSpec.model_validate_json(text)
    assert spec.base_loss == BaseLossSpec(name="dro", params={"beta": 0.5})
    batch, outputs = sampled(*make_batch([3, 2]))
    by_spec = evaluate_base(Objective.from_spec(spec).base, outputs, batch)
    assert by_spec.value == evaluate_base(Objective(spec.base_loss).base, outputs, batch).value
    assert by_spec.value != evaluate_base(Objective("dro").base, outputs, batch).value
    assert Objective(BaseLossSpec(name="cross_entropy")).base is None


def test_missing_inputs_of_a_policy_loss_raise_before_and_during_the_run():
    objective = Objective("ppo", [{"name": "confidence"}])
    objective.check_needs({"sampling_logprobs", "advantages"})
    with pytest.raises(ObjectiveError, match=r"Term 'base' needs advantages, .* use another base loss"):
        objective.check_needs({"sampling_logprobs"})
    batch, outputs = sampled(*make_batch([3]))
    with pytest.raises(
        ObjectiveError, match="Term 'base' needs advantages, which the outputs and the batch do not have"
    ):
        evaluate_base(objective.base, outputs, replace(batch, advantages_DT=None))
    with pytest.raises(ObjectiveError, match="A batch of 3 tokens has 2 advantages"):
        replace(batch, advantages_DT=torch.ones(2))


def test_a_batch_of_zero_advantages_has_no_gradient_and_no_error():
    batch, outputs = sampled(*make_batch([3, 2]))
    batch = replace(batch, advantages_DT=torch.zeros(5))
    assert not evaluate_base(Objective("ppo").base, outputs, batch, first_step=True).gradient_DT.any()


def test_a_term_may_need_advantages():
    from objectives import regularizer

    @regularizer("test_advantage", needs=("advantages",), reduction="sum")
    def advantage(outputs, batch):
        return -outputs.logprobs_DT * batch.advantages_DT

    (bound,) = Objective(regularizers=[{"fn": advantage}]).regularizers
    batch, outputs = sampled(*make_batch([4]))
    evaluation = evaluate_term(bound, outputs, batch, first_step=True)
    assert batch.advantages_DT is not None
    torch.testing.assert_close(evaluation.gradient_DT, -batch.advantages_DT.double())


def test_enhanced_ppo_needs_the_inputs_of_its_coefficients():
    batch, outputs = sampled(*make_batch([3, 2]))
    bare = {"value_coeff": 0, "kl_coeff": 0, "entropy_coeff": 0}
    without_coefficients = Objective({"name": "enhanced_ppo", "params": bare})
    without_coefficients.check_needs({"sampling_logprobs", "advantages"})
    ppo = evaluate_base(Objective("ppo").base, outputs, batch)
    assert evaluate_base(
        without_coefficients.base, replace(outputs, ref_logprobs_DT=None), batch
    ).value == pytest.approx(ppo.value)

    objective = Objective("enhanced_ppo")
    with pytest.raises(ObjectiveError, match="Term 'base' needs values, but this flow provides only"):
        objective.check_needs(["sampling_logprobs", "advantages", "ref_logprobs"])
    objective.check_needs(["sampling_logprobs", "advantages", "ref_logprobs", "values", "returns"])
    with pytest.raises(ObjectiveError, match="'base' needs returns, which the outputs and the batch do not have"):
        evaluate_base(objective.base, outputs, replace(batch, returns_DT=None))
    with pytest.raises(ObjectiveError, match="A batch of 5 tokens has 2 values"):
        replace(batch, values_DT=torch.ones(2))
    assert {"entropy", "kl_ref", "critic_error", "ratio_mean"} <= evaluate_base(
        objective.base, outputs, batch
    ).metrics.keys()


def test_the_policy_part_of_a_loss_is_its_surrogate_alone():
    """Against losses of the policy part alone, with coefficients that make the other parts large."""
    batch, outputs = sampled(*make_batch([3, 2]))
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    cases = {
        "enhanced_ppo": ({**bounds, "entropy_coeff": 9.0, "kl_coeff": 9.0, "value_coeff": 9.0}, "ppo", bounds),
        "conservative_ppo": ({"kl_coeff": 9.0}, "importance_sampling", {}),
        "stable_reinforce": ({"kl_coeff": 9.0}, "cispo", {"clip_high_threshold": 1.0}),
        "dro": ({"beta": 9.0}, "dro", {"beta": 0.0}),
    }
    for name, (params, other, other_params) in cases.items():
        whole = evaluate_base(Objective({"name": name, "params": params}).base, outputs, batch)
        alone = evaluate_base(Objective({"name": other, "params": other_params}).base, outputs, batch)
        assert whole.metrics["policy"] == pytest.approx(alone.value / 5), name
        assert abs(whole.value - alone.value) > 0.1, name


def test_a_critic_adds_a_metric_without_training_the_policy():
    batch, outputs = sampled(*make_batch([3, 2]))
    assert batch.values_DT is not None
    objective = Objective("enhanced_ppo")
    actual = evaluate_base(objective.base, outputs, batch)
    worse = evaluate_base(objective.base, outputs, replace(batch, values_DT=batch.values_DT + 100))
    assert worse.value > actual.value + 1000
    torch.testing.assert_close(worse.gradient_DT, actual.gradient_DT)


@pytest.mark.parametrize("name", CLIENT_SIDE)
def test_a_client_side_loss_combines_with_any_term(name):
    """The sent weights equal the autograd gradient of the loss plus the weighted term."""
    batch, outputs = sampled(*make_batch([3, 1, 4], masks=[True, True, False, True, True, True, False, True]))
    objective = Objective(name, [{"name": "confidence", "weight": 0.7}])
    term = evaluate_term(objective.regularizers[0], outputs, batch, first_step=True)
    linear = linearize(evaluate_base(objective.base, outputs, batch), [(term, 0.7)])

    mask, loss = batch.mask_DT, CLIENT_SIDE[name]
    logprobs_DT = outputs.logprobs_DT.clone().requires_grad_()
    given = {
        "logprobs": outputs.sampling_logprobs_DT,
        "ref_logprobs": outputs.ref_logprobs_DT,
        "advantages": batch.advantages_DT,
        "values": batch.values_DT,
        "returns": batch.returns_DT,
    }
    inputs = {key: value[mask] for key, value in given.items() if value is not None}
    p = logprobs_DT[mask].exp()
    base = loss.compute(logprobs_DT[mask], inputs, torch.tensor([0, 2, 3, 6]), loss.defaults)
    (expected,) = torch.autograd.grad(base + 0.7 * (p * p.log()).mean(), logprobs_DT)
    torch.testing.assert_close(linear.loss_weights_DT, -expected, rtol=1e-9, atol=1e-9)

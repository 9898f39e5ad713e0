"""Preference terms as regularizers and base losses, compared with the loss functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ragged_batches import datums, make_batch, with_policies
from test_evaluate import bind, evaluate

from objectives import Batch, Objective, ObjectiveError, ObjectiveSpec, Outputs, evaluate_base, evaluate_term, linearize
from objectives.labels import find_preference_pairs
from objectives.losses import PairLogprobs, bradley_terry, dpo, ipo, kto, orpo, simpo

MASKS = [False, True, True, True, False, True, True, False, True, True, True]
LENGTHS = [4, 3, 2, 2]


def case() -> tuple[Batch, Outputs]:
    """Four completions of two interleaved pairs, so the batch order differs from the pair order."""
    batch, outputs = with_policies(*make_batch(LENGTHS, masks=MASKS))
    return replace(batch, labels_D={"pair": torch.tensor([4, 1, 4, 1])}), outputs


def pairs(values_DT: torch.Tensor, batch: Batch) -> PairLogprobs:
    tokens_D = [torch.tensor(tokens, dtype=torch.float64) for tokens in datums(values_DT, batch)]
    chosen, rejected = [tokens_D[0], tokens_D[1]], [tokens_D[2], tokens_D[3]]
    sums = [torch.stack([tokens.sum() for tokens in answers]) for answers in (chosen, rejected)]
    lengths = [torch.tensor([len(tokens) for tokens in answers]) for answers in (chosen, rejected)]
    return PairLogprobs(*sums, *lengths)


def expected(name: str, batch: Batch, outputs: Outputs) -> torch.Tensor:
    assert outputs.ref_logprobs_DT is not None
    policy, reference = pairs(outputs.logprobs_DT, batch), pairs(outputs.ref_logprobs_DT, batch)
    match name:
        case "dpo" | "ipo":
            return {"dpo": dpo, "ipo": ipo}[name](policy, reference, beta=0.3)
        case "simpo":
            return simpo(policy, beta=0.3)
        case "orpo":
            return orpo(policy)
    return bradley_terry(policy.chosen_P, policy.rejected_P)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "bradley_terry"])
def test_a_term_is_the_mean_loss_over_the_pairs(name):
    batch, outputs = case()
    params = {"beta": 0.3} if name in ("dpo", "ipo", "simpo") else {}
    actual = evaluate(bind(name, params=params), outputs, batch)
    assert actual.value == pytest.approx(expected(name, batch, outputs).mean().item())
    as_base = evaluate_base(Objective({"name": name, "params": params}).base, outputs, batch)
    assert (as_base.name, as_base.value, as_base.metrics) == ("base", actual.value, actual.metrics)
    torch.testing.assert_close(as_base.gradient_DT, actual.gradient_DT)


def test_dpo_metrics_are_computed_from_rewards():
    batch, outputs = case()
    assert outputs.ref_logprobs_DT is not None
    policy, reference = pairs(outputs.logprobs_DT, batch), pairs(outputs.ref_logprobs_DT, batch)
    chosen, rejected = 0.3 * (policy.chosen_P - reference.chosen_P), 0.3 * (policy.rejected_P - reference.rejected_P)
    assert evaluate(bind("dpo", params={"beta": 0.3}), outputs, batch).metrics == pytest.approx(
        {
            "accuracy": float((chosen > rejected).double().mean()),
            "margin": float((chosen - rejected).mean()),
            "chosen_reward": float(chosen.mean()),
            "rejected_reward": float(rejected.mean()),
            "length_correlation": correlation([*chosen, *rejected], [3, 2, 1, 2]),
        }
    )


def correlation(rewards: list[torch.Tensor], lengths: list[int]) -> float:
    return float(torch.corrcoef(torch.stack([torch.stack(rewards), torch.tensor(lengths).double()]))[0, 1])


def test_the_label_desirable_selects_the_chosen_completion():
    batch, outputs = case()
    swapped, ordered = (labelled(batch, desirable) for desirable in ([0, 1, 1, 0], [1, 1, 0, 0]))
    ordered_value, swapped_value = (
        evaluate(bind("dpo"), outputs, labelled_batch) for labelled_batch in (ordered, swapped)
    )
    by_order = evaluate(bind("dpo"), outputs, batch)
    assert (ordered_value.value, ordered_value.metrics) == (by_order.value, by_order.metrics)
    assert find_preference_pairs(swapped).first_P.tolist() == [1, 2]
    assert swapped_value.value != ordered_value.value
    for wrong in ([1, 1, 1, 0], [0, 1, 0, 0], [-1, 1, 2, 0]):
        with pytest.raises(ObjectiveError, match="one datum with the label 'desirable' 1 and one with 0"):
            find_preference_pairs(labelled(batch, wrong))


def labelled(batch: Batch, desirable: list[int]) -> Batch:
    return replace(batch, labels_D={**batch.labels_D, "desirable": torch.tensor(desirable)})


def test_kto_estimates_the_divergence_from_unlabelled_datums():
    batch, outputs = case()
    batch = replace(batch, labels_D={"desirable": torch.tensor([1, 0, -1, -1])})
    assert outputs.ref_logprobs_DT is not None
    log_ratio = torch.tensor([sum(tokens) for tokens in datums(outputs.logprobs_DT - outputs.ref_logprobs_DT, batch)])
    log_ratio = log_ratio.double()
    z = log_ratio[2:].mean().clamp(min=0)
    expected_D = kto(log_ratio[:2], torch.tensor([True, False]), z, beta=0.3, undesirable_weight=2.0)
    actual = evaluate(bind("kto", params={"beta": 0.3, "undesirable_weight": 2.0}), outputs, batch)
    assert actual.value == pytest.approx(expected_D.mean().item(), rel=1e-6)
    assert actual.metrics["z"] == pytest.approx(z.item(), rel=1e-6)
    assert actual.metrics["accuracy"] == ((log_ratio[0] > z).float() + (log_ratio[1] <= z).float()) / 2
    assert actual.metrics["margin"] == pytest.approx(0.3 * float(log_ratio[0] - log_ratio[1]), rel=1e-6)
    assert not actual.gradient_DT[7:].any()
    with pytest.raises(ObjectiveError, match="no datum of the batch has both a label 'desirable' and a trained token"):
        evaluate(bind("kto"), outputs, replace(batch, labels_D={"desirable": torch.full((4,), -1)}))


def test_a_preference_combines_with_other_terms():
    batch, outputs = case()
    objective = Objective({"name": "dpo", "params": {"beta": 0.3}}, [{"name": "confidence", "weight": 0.5}])
    term = evaluate_term(objective.regularizers[0], outputs, batch, first_step=True)
    linear = linearize(evaluate_base(objective.base, outputs, batch), [(term, 0.5)])
    dpo_alone = evaluate(bind("dpo", params={"beta": 0.3}), outputs, batch)
    torch.testing.assert_close(linear.loss_weights_DT, -(dpo_alone.gradient_DT + 0.5 * term.gradient_DT))
    regularized = Objective("cross_entropy", [{"name": "orpo", "weight": 0.5}])
    assert evaluate_term(regularized.regularizers[0], outputs, batch, first_step=True).gradient_DT.any()


def test_a_spec_selects_a_preference_and_validates_its_parameters():
    spec = ObjectiveSpec.model_validate_json('{"base_loss": {"name": "simpo", "params": {"gamma": 0}}}')
    base = Objective.from_spec(spec).base
    assert base is not None
    assert base.params == {"beta": 2.0, "gamma": 0.0}
    with pytest.raises(ObjectiveError, match=r"'beta' is 0, but input should be greater than 0"):
        Objective({"name": "dpo", "params": {"beta": 0}})
    with pytest.raises(ObjectiveError, match=r"Term 'base' needs ref_logprobs, .* use another base loss"):
        Objective("dpo").check_needs(())
    with pytest.raises(ObjectiveError, match="The base loss 'logic' is a scored term"):
        Objective("logic")

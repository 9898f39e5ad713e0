"""Losses of the SDK's shape: what they give here is what tinker itself computes from them, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tinker
import torch
from ragged_batches import make_batch
from tinker.lib.public_interfaces.training_client import TrainingClient

from objectives import Batch, Objective, ObjectiveError, Outputs, evaluate_base, evaluate_term, linearize
from objectives.batch import unpack

LENGTHS = (5, 1, 12)


def preference_loss(data, logprobs):
    """As DPO is written for the SDK: dot products with float32 weights of the datums, then a scalar of their margin."""
    scores = [
        torch.dot(each.float(), torch.tensor(datum.loss_fn_inputs["weights"].data).float())
        for datum, each in zip(data, logprobs, strict=True)
    ]
    loss = -torch.nn.functional.logsigmoid(0.1 * (scores[0] + scores[1] - scores[2])).mean()
    return loss, {"margin": (scores[0] - scores[2]).item()}


def squares(data, logprobs):
    return sum((each**2).sum() for each in logprobs), {}


def sdk_case() -> tuple[Batch, Outputs, list[tinker.Datum]]:
    batch, outputs = make_batch(LENGTHS, seed=3)
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1] * length),
            loss_fn_inputs={"target_tokens": torch.ones(length, dtype=torch.int64), "weights": weights},
        )
        for length, weights in zip(LENGTHS, unpack(batch.weights_DT, batch.offsets_D), strict=True)
    ]
    return replace(batch, datums=data), Outputs(outputs.logprobs_DT.float()), data


def what_tinker_computes(loss_fn, data, outputs: Outputs, batch: Batch):
    """The SDK's own client-side half of `forward_backward_custom`."""
    forward = tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": tinker.TensorData.from_torch(each)} for each in unpack(outputs.logprobs_DT, batch.offsets_D)
        ],
    )
    result = TrainingClient._compute_custom_loss(data, loss_fn, forward)
    sent = [torch.tensor(each.loss_fn_inputs["weights"].data) for each in result.data]
    return result.loss_sum, torch.cat(sent), result.metrics


@pytest.mark.parametrize("loss_fn", [preference_loss, squares])
def test_as_base_loss_it_sends_what_the_sdk_sends(loss_fn):
    batch, outputs, data = sdk_case()
    loss_sum, weights_DT, metrics = what_tinker_computes(loss_fn, data, outputs, batch)
    base = evaluate_base(Objective(base_loss=loss_fn), outputs, batch)
    assert (base.value, base.metrics) == (loss_sum, metrics)
    assert torch.equal(linearize(base, []).loss_weights_DT, weights_DT)


def test_as_a_term_it_is_weighted():
    batch, outputs, data = sdk_case()
    loss_sum, weights_DT, metrics = what_tinker_computes(preference_loss, data, outputs, batch)
    objective = Objective(regularizers=[{"fn": preference_loss, "weight": 0.5}])
    (bound,) = objective.regularizers
    term = evaluate_term(bound, outputs, batch, first_step=True)
    linear = linearize(evaluate_base(objective, outputs, batch), [(term, bound.weight_at(0, 1))])
    assert (term.name, term.value) == ("preference_loss", loss_sum)
    assert linear.metrics["term/preference_loss/margin"] == metrics["margin"]
    torch.testing.assert_close(linear.loss_weights_DT, batch.weights_DT + 0.5 * weights_DT)


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda outputs, batch: outputs.logprobs_DT, "if it takes (outputs, batch), decorate it with `@regularizer`"),
        (
            lambda data, logprobs: logprobs[0].sum(),
            "called as the SDK's (data, logprobs) -> (loss, metrics), it raised",
        ),
        (
            lambda data, logprobs: (logprobs[0], {}),
            "called as the SDK's (data, logprobs) -> (loss, metrics), it raised",
        ),
        (lambda data, logprobs: (1.0, {}), "is declared differentiable, but its value does not depend"),
        (lambda data, logprobs: (logprobs[0].sum() / 0, {}), "has the value -inf"),
    ],
)
def test_a_wrong_one_is_named(loss_fn, says):
    batch, outputs, _ = sdk_case()
    with pytest.raises(ObjectiveError) as refused:
        evaluate_base(Objective(base_loss=loss_fn), outputs, batch)
    assert says in str(refused.value)
    assert "'base'" in str(refused.value)


def test_without_the_datums_it_says_so():
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match="it reads the service's datums, and the batch came without"):
        evaluate_base(Objective(base_loss=squares), outputs, batch)


def test_a_nameless_loss_has_to_be_named():
    with pytest.raises(ObjectiveError, match="'name' is '<lambda>', but string should match pattern"):
        Objective(regularizers=[{"fn": lambda data, logprobs: (0, {})}])

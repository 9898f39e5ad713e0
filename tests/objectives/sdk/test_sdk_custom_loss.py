"""SDK losses as terms are bitwise equal to tinker's own computation."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import pytest
import tinker
import torch
from ragged_batches import make_batch
from tinker.lib.public_interfaces.training_client import TrainingClient

from objectives import Batch, Objective, ObjectiveError, Outputs, evaluate_base, evaluate_term, linearize
from objectives.batch import unpack
from objectives.config.term_lookup import find_term

LENGTHS = (5, 1, 12)


def preference_loss(data, logprobs):
    """DPO in the style of the SDK: dot products with float32 weights, then a scalar of the margin."""
    scores = [
        torch.dot(logprobs_T.float(), torch.tensor(datum.loss_fn_inputs["weights"].data).float())
        for datum, logprobs_T in zip(data, logprobs, strict=True)
    ]
    loss = -torch.nn.functional.logsigmoid(0.1 * (scores[0] + scores[1] - scores[2])).mean()
    return loss, {"margin": (scores[0] - scores[2]).item()}


def squares(data, logprobs):
    return sum((logprobs_T**2).sum() for logprobs_T in logprobs), {}


def temperature_loss(data, logprobs, *, temperature):
    return sum((logprobs_T / temperature).exp().sum() for logprobs_T in logprobs), {"temperature": temperature}


def lukewarm_loss(data, logprobs):
    return temperature_loss(data, logprobs, temperature=2.0)


async def awaited_loss(data, logprobs):
    await asyncio.sleep(0)
    return lukewarm_loss(data, logprobs)


@functools.wraps(awaited_loss)
def driven_loss(data, logprobs):
    """Loss that a decorator made synchronous."""
    return asyncio.run(awaited_loss(data, logprobs))


async def bare_loss(data, logprobs):
    return logprobs[0].sum()


class CallableLoss:
    def __call__(self, data, logprobs):
        return lukewarm_loss(data, logprobs)


class AwaitableLoss:
    async def __call__(self, data, logprobs):
        return await awaited_loss(data, logprobs)


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
    """Run the SDK's client-side part of `forward_backward_custom`."""
    forward = tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": tinker.TensorData.from_torch(logprobs_T)}
            for logprobs_T in unpack(outputs.logprobs_DT, batch.offsets_D)
        ],
    )
    result = TrainingClient._compute_custom_loss(data, loss_fn, forward)
    sent = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in result.data]
    return result.loss_sum, torch.cat(sent), result.metrics


@pytest.mark.parametrize("loss_fn", [preference_loss, squares])
def test_an_sdk_loss_as_base_loss_sends_the_same_request(loss_fn):
    batch, outputs, data = sdk_case()
    loss_sum, weights_DT, metrics = what_tinker_computes(loss_fn, data, outputs, batch)
    base = evaluate_base(Objective(base_loss=loss_fn).base, outputs, batch)
    assert (base.value, base.metrics) == (loss_sum, metrics)
    assert torch.equal(linearize(base, []).loss_weights_DT, weights_DT)


def test_an_sdk_loss_as_a_term_is_weighted():
    batch, outputs, data = sdk_case()
    loss_sum, weights_DT, metrics = what_tinker_computes(preference_loss, data, outputs, batch)
    objective = Objective(regularizers=[{"fn": preference_loss, "weight": 0.5}])
    (bound,) = objective.regularizers
    term = evaluate_term(bound, outputs, batch, first_step=True)
    linear = linearize(evaluate_base(objective.base, outputs, batch), [(term, bound.weight_at(0, 1))])
    assert (term.name, term.value) == ("preference_loss", loss_sum)
    assert linear.metrics["term/preference_loss/margin"] == metrics["margin"]
    torch.testing.assert_close(linear.loss_weights_DT, batch.weights_DT + 0.5 * weights_DT)


@pytest.mark.parametrize(
    ("loss_fn", "execution"),
    [
        (functools.partial(temperature_loss, temperature=2.0), "thread"),
        (lambda data, logprobs: lukewarm_loss(data, logprobs), "thread"),
        (CallableLoss(), "inline"),
        (driven_loss, "thread"),
        (awaited_loss, "thread"),
        (awaited_loss, "async"),
        (functools.partial(awaited_loss), "async"),
        (AwaitableLoss(), "async"),
    ],
)
def test_any_callable_is_a_loss(loss_fn, execution):
    batch, outputs, data = sdk_case()
    loss_sum, weights_DT, metrics = what_tinker_computes(lukewarm_loss, data, outputs, batch)
    base = evaluate_base(Objective(base_loss=loss_fn).base, outputs, batch)
    (bound,) = Objective(regularizers=[{"name": "mine", "fn": loss_fn, "execution": execution}]).regularizers
    term = evaluate_term(bound, outputs, batch, first_step=True)
    for evaluation in (base, term):
        assert (evaluation.value, evaluation.metrics) == (loss_sum, metrics)
        torch.testing.assert_close(-evaluation.gradient_DT, weights_DT)


def test_the_name_of_a_loss_is_that_of_its_function():
    entries = [{"fn": functools.partial(temperature_loss, temperature=2.0)}, {"fn": awaited_loss}]
    assert [term.name for term in Objective(regularizers=entries).regularizers] == ["temperature_loss", "awaited_loss"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"fn": lambda data, logprobs: (0, {})}, "is a lambda, which has no name; write {'name': 'my_term', 'fn': "),
        ({"fn": CallableLoss()}, "is a CallableLoss, which has no name; write {'name': 'my_term', 'fn': ..., ...}."),
        (
            {"name": "sharp", "fn": functools.partial(find_term("kl"), form="k3")},
            "write {'name': 'sharp', 'fn': 'kl', 'params': {...}} with its arguments as params",
        ),
    ],
)
def test_a_refused_loss_says_what_to_write(entry, message):
    with pytest.raises(ObjectiveError) as error:
        Objective(regularizers=[entry])
    assert message in str(error.value)


def test_an_error_in_an_async_loss_is_the_cause():
    async def unlucky_loss(data, logprobs):
        raise LookupError("no such row")

    batch, outputs, _ = sdk_case()
    with pytest.raises(
        ObjectiveError, match=r"Term 'base' failed evaluating: .* raised LookupError: no such row"
    ) as error:
        evaluate_base(Objective(base_loss=unlucky_loss).base, outputs, batch)
    assert error.value.__cause__ is not None
    assert isinstance(error.value.__cause__.__cause__, LookupError)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda outputs, batch: outputs.logprobs_DT,
            "if its parameters are (outputs, batch), decorate it with `@regularizer`",
        ),
        (
            lambda data, logprobs: logprobs[0].sum(),
            "the function returned Tensor, but a loss of the SDK returns (loss, metrics); return the loss and",
        ),
        (bare_loss, "the function returned Tensor, but a loss of the SDK returns (loss, metrics)"),
        (
            lambda data, logprobs: (logprobs[0].sum(), None),
            "the function returned (Tensor, NoneType), but a loss of the SDK returns (loss, metrics)",
        ),
        (
            lambda data, logprobs: (logprobs[0], {}),
            "the function returned a loss of shape (5,), but a loss of the SDK is one number",
        ),
        (lambda data, logprobs: (1.0, {}), "is declared differentiable, but its value does not depend"),
        (lambda data, logprobs: (logprobs[0].sum() / 0, {}), "has the value -inf"),
    ],
)
def test_a_wrong_sdk_loss_raises(loss_fn, message):
    batch, outputs, _ = sdk_case()
    with pytest.raises(ObjectiveError) as error:
        evaluate_base(Objective(base_loss=loss_fn).base, outputs, batch)
    assert message in str(error.value)
    assert "'base'" in str(error.value)


def test_an_sdk_loss_without_datums_raises():
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match="the batch has no datums, which a loss of the SDK reads"):
        evaluate_base(Objective(base_loss=squares).base, outputs, batch)

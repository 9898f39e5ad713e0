"""The update: gradients and optimizer step, the two requests that must never be sent twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tinker
from tinker import types
from torch import Tensor

from objectives.batch import Batch, Outputs, unpack
from objectives.one_pass import ServiceLoss
from objectives.regularizer import Regularizer
from tasks.answer import wait_for_answer
from tasks.forward import PendingOutput, read_outputs
from tasks.options import step_task


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """One update under way: both requests are sent, neither is answered.

    `optim_step` is None where the gradients of more minibatches are to come.
    """

    forward_backward: PendingOutput
    optim_step: tinker.APIFuture[types.OptimStepResponse] | None


def enqueue_update(
    client: tinker.TrainingClient, batch: Batch, loss_weights_DT: Tensor, adam: types.AdamParams | None
) -> PendingUpdate:
    """Send `forward_backward` and `optim_step` back to back.

    Args:
        loss_weights_DT: the weight of each target token in the service's cross-entropy: minus the gradient of the
            objective with respect to its logprob (see `objectives.linearize`).
        adam: None leaves the optimizer step to a later minibatch.
    """
    data = [
        replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weights": types.TensorData.from_torch(weights)})
        for datum, weights in zip(batch.datums, unpack(loss_weights_DT, batch.offsets_D), strict=True)
    ]
    return PendingUpdate(client.forward_backward(data, "cross_entropy"), client.optim_step(adam) if adam else None)


def enqueue_one_pass_update(
    client: tinker.TrainingClient,
    batch: Batch,
    beside: Outputs,
    loss: ServiceLoss,
    weight_of: Callable[[Regularizer], float],
    adam: types.AdamParams | None,
) -> PendingUpdate:
    """Send `forward_backward` with a loss that the service has, and `optim_step`, back to back.

    Args:
        beside: what there is beside the current logprobs.
        weight_of: the weight of a term at the step.
        adam: as in `enqueue_update`.
    """
    data = loss.data_at(beside, batch, weight_of)
    return PendingUpdate(loss.send(client, data), client.optim_step(adam) if adam else None)


@step_task(name="forward_backward")
def forward_backward(pending: PendingOutput, batch: Batch) -> Outputs:
    """Wait until the gradient is accumulated; the logprobs are those before the update."""
    return read_outputs(wait_for_answer(pending, "run forward_backward"), batch)


@step_task(name="optim_step")
def optim_step(pending: tinker.APIFuture[types.OptimStepResponse]) -> dict[str, float]:
    """Wait until the weights are updated; the service's own metrics."""
    return dict(wait_for_answer(pending, "take the optimizer step").metrics or {})

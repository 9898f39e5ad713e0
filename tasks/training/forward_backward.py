"""Requests of a training step: the forward pass, and the update, whose two requests must never be sent twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tinker
from tinker import types
from torch import Tensor

from blocks.errors import PoisonedError, ServiceError
from objectives.batch import Batch, Outputs, pack, unpack
from objectives.gradients.diagnostics import all_finite
from objectives.one_pass.planner import ServiceLoss
from objectives.term import Regularizer
from tasks.common.service_errors import wait_for_response
from tasks.common.task import step_task

PendingOutput = tinker.APIFuture[types.ForwardBackwardOutput]

# Norm of the gradient with respect to the weights, before clipping.
_OPTIMIZER_METRICS = {"unclipped_grad_l2:mean": "optim/grad_norm"}


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """Update whose requests are sent but have no response yet.

    `optim_step` is None if more minibatches of the update follow.
    """

    forward_backward: PendingOutput
    optim_step: tinker.APIFuture[types.OptimStepResponse] | None


def enqueue_update(
    client: tinker.TrainingClient, batch: Batch, loss_weights_DT: Tensor, adam: types.AdamParams | None
) -> PendingUpdate:
    """Send `forward_backward` and `optim_step` back to back.

    Args:
        loss_weights_DT: weight of each target token in the service's cross-entropy: the negative gradient of the
            objective with respect to the token's logprob (see `objectives.gradients.linearize`).
        adam: optimizer parameters; None defers the optimizer step to a later minibatch.
    """
    data = [
        replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weights": types.TensorData.from_torch(weights)})
        for datum, weights in zip(batch.datums, unpack(loss_weights_DT, batch.offsets_D), strict=True)
    ]
    return PendingUpdate(client.forward_backward(data, "cross_entropy"), client.optim_step(adam) if adam else None)


def enqueue_one_pass_update(
    client: tinker.TrainingClient,
    batch: Batch,
    other_outputs: Outputs,
    loss: ServiceLoss,
    weight_of: Callable[[Regularizer], float],
    adam: types.AdamParams | None,
) -> PendingUpdate:
    """Send `forward_backward` with a loss that the service computes, and `optim_step`, back to back.

    Args:
        other_outputs: outputs other than the current logprobs, such as reference logprobs.
        weight_of: function that returns the weight of a term at the step.
        adam: optimizer parameters; None defers the optimizer step to a later minibatch.
    """
    data = loss.build_data(other_outputs, batch, weight_of)
    return PendingUpdate(loss.send(client, data), client.optim_step(adam) if adam else None)


@step_task(name="forward_backward")
def forward_backward(pending: PendingOutput, batch: Batch) -> Outputs:
    """Wait until the service has accumulated the gradient; return the logprobs before the update."""
    return read_outputs(wait_for_response(pending, "run forward_backward"), batch)


@step_task(name="optim_step")
def optim_step(pending: tinker.APIFuture[types.OptimStepResponse]) -> dict[str, float]:
    """Wait for the update; return the service's metrics, with the gradient norm as `optim/grad_norm`."""
    metrics = wait_for_response(pending, "take the optimizer step").metrics or {}
    return {_OPTIMIZER_METRICS.get(name, name): value for name, value in metrics.items()}


def enqueue_forward(client: tinker.TrainingClient, batch: Batch) -> PendingOutput:
    """Request the logprobs of a batch under the weights after all updates enqueued so far."""
    return client.forward(list(batch.datums), "cross_entropy")


@step_task(name="forward")
def forward_logprobs(pending: PendingOutput, batch: Batch) -> Outputs:
    """Wait for the logprobs of a batch."""
    return read_outputs(wait_for_response(pending, "run the forward pass"), batch)


def read_outputs(output: types.ForwardBackwardOutput, batch: Batch) -> Outputs:
    """Pack the service's logprobs in the layout of the batch.

    Raises:
        ServiceError: the number or lengths of the logprobs differ from the batch's.
        PoisonedError: a logprob is NaN or infinite.
    """
    logprobs_DT, offsets_D = pack([entry["logprobs"].to_torch() for entry in output.loss_fn_outputs])
    if len(offsets_D) != len(batch.offsets_D):
        raise ServiceError(
            f"The Tinker service returned logprobs for {len(offsets_D) - 1} datums and {len(logprobs_DT)} tokens "
            f"but {batch.num_datums} and {batch.num_tokens} were sent: report this to the operator of the service."
        )
    lengths_D = zip(offsets_D.diff().tolist(), batch.offsets_D.diff().tolist(), strict=True)
    for datum, (num_logprobs, num_targets) in enumerate(lengths_D):
        if num_logprobs != num_targets:
            raise ServiceError(
                f"The Tinker service returned {num_logprobs} logprobs for datum {datum}, which has {num_targets} "
                "target tokens: report this to the operator of the service."
            )
    if not all_finite(logprobs_DT):
        raise PoisonedError(
            f"The Tinker service returned {int((~logprobs_DT.isfinite()).sum())} logprobs of {len(logprobs_DT)} that "
            "are not finite: lower the learning rate or check the data of the preceding steps."
        )
    return Outputs(logprobs_DT.float())

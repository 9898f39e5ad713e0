"""The forward pass: what the current policy thinks of a batch."""

from __future__ import annotations

import tinker
from tinker import types

from blocks.errors import PoisonedError, ServiceError
from objectives.batch import Batch, Outputs, pack
from objectives.diagnostics import all_finite
from tasks.answer import wait_for_answer
from tasks.options import step_task

PendingOutput = tinker.APIFuture[types.ForwardBackwardOutput]


def enqueue_forward(client: tinker.TrainingClient, batch: Batch) -> PendingOutput:
    """Ask for the logprobs of a batch; the answer is for the weights after every update asked for before."""
    return client.forward(list(batch.datums), "cross_entropy")


@step_task(name="forward")
def forward_logprobs(pending: PendingOutput, batch: Batch) -> Outputs:
    """Wait for the logprobs of a batch."""
    return read_outputs(wait_for_answer(pending, "run the forward pass"), batch)


def read_outputs(output: types.ForwardBackwardOutput, batch: Batch) -> Outputs:
    """Pack the service's logprobs as the batch is packed.

    Raises:
        ServiceError: their number or lengths are not the batch's.
        PoisonedError: one of them is NaN or infinite.
    """
    logprobs_DT, offsets_D = pack([entry["logprobs"].to_torch() for entry in output.loss_fn_outputs])
    if offsets_D.tolist() != batch.offsets_D.tolist():
        raise ServiceError(
            f"The Tinker service returned logprobs for {len(offsets_D) - 1} datums and {len(logprobs_DT)} tokens "
            f"where {batch.num_datums} and {batch.num_tokens} were sent: report this to whoever runs the service."
        )
    if not all_finite(logprobs_DT):
        raise PoisonedError(
            f"The Tinker service returned {int((~logprobs_DT.isfinite()).sum())} logprobs of {len(logprobs_DT)} that "
            "are not finite: lower the learning rate, or look at the data of the steps before."
        )
    return Outputs(logprobs_DT.float())

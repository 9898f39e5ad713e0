"""Which steps of a run are one pass of the service: those whose objective it has as a loss."""

from __future__ import annotations

import tinker
from prefect.logging import get_run_logger

from flows.run import Run
from objectives.batch import Batch, Outputs
from objectives.one_pass import OnePass, ServiceLoss
from tasks.service_errors import service_errors


def loss_of(run: Run, one_pass: OnePass, step: int, beside: Outputs, batch: Batch) -> ServiceLoss | None:
    """The loss that the service has for a step; None for two passes, and for cross-entropy alone, which needs none.

    Args:
        beside: what there is beside the current logprobs.

    Raises:
        ObjectiveError: the backend is `server`, and the objective cannot be one pass.
        ServiceError: the service failed where it neither took the loss nor refused it.
    """
    objective = one_pass.objective
    if objective.base is None and not any(each.due_at(step) for each in objective.regularizers):
        return None
    try:
        loss = one_pass.loss_at(step, beside, batch)
    except tinker.TinkerError:
        with service_errors("take the objective as a loss"):
            raise
    for note in one_pass.take_notes():
        get_run_logger().info(note)
        run.log.tag("tinker_flows.passes", note)
    return loss

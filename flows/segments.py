"""Segments: what lies between two checkpoints is tried again as a whole, because no request of it may be sent twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from prefect.context import TagsContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import AbsentError, RolledBackError, ServiceLostError
from flows.blocks_of import storage_of
from flows.config import RunConfig
from flows.stop import CancelledInTheUI
from tasks.checkpoint import resumable, step_of

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0


def in_segments(config: RunConfig, attempt: Callable[[Sequence[str]], T]) -> T:
    """Open a run, and where the service is lost under it or a guard rolls back, open it again at its last checkpoint.

    Args:
        attempt: opens the run and goes on to its end, given why it was opened again, each time.

    Returns:
        What the attempt returns, or for Prefect to end the flow run with it, the state of one cancelled in the UI.

    Raises:
        ServiceLostError, AbsentError: the service was lost, or it or MLflow not there again, once more than
            `max_restarts` times without a checkpoint between.
    """
    reasons: list[str] = []
    num_in_a_row = 0
    records = _records(config)
    step = _last_step(records)
    _refuse_endless_crashes(config, records)
    while True:
        try:
            # A tagged task asks the server for a slot before it starts, and fails where the server is away.
            with TagsContext(current_tags=set()):
                return attempt(tuple(reasons))
        except CancelledInTheUI as cancelled:
            return cast(T, Cancelled(message=str(cancelled)))
        except RolledBackError as error:  # each one passes over another step, so that they come to an end
            reasons.append(str(error))
        except (AbsentError, ServiceLostError) as error:
            if isinstance(error, AbsentError) and not reasons:
                raise  # at the beginning an address is more likely misspelt than its server restarting
            before, step = step, _last_step(_records(config))
            num_in_a_row = num_in_a_row + 1 if step == before else 1
            if num_in_a_row > config.max_restarts:
                raise
            reasons.append(f"after step {step}: {error}")
            pause_s = min(2.0**num_in_a_row, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            get_run_logger().warning("%s The run goes on from its last checkpoint in %.0f s.", error, pause_s)
            time.sleep(pause_s)


def _records(config: RunConfig) -> list[CheckpointRecord]:
    return resumable(storage_of(config).run_directory(config.run_name))


def _last_step(records: Sequence[CheckpointRecord]) -> int:
    return step_of(records[0]) if records else 0


def _refuse_endless_crashes(config: RunConfig, records: Sequence[CheckpointRecord]) -> None:
    """Of a flow run that is started again after each crash: what kills it may be itself.

    Raises:
        ServiceLostError: it was started once more than `max_restarts` times without a checkpoint between.
    """
    own = [each for each in records if each.get("flow_run_id", None) == flow_run.get_id()]
    num_before = int(own[0].get("flow_run_count", 1)) if own else 1
    num_in_a_row = (flow_run.get_run_count() or 1) - num_before
    if num_in_a_row > config.max_restarts:
        raise ServiceLostError(
            f"The run was started again {num_in_a_row} times without a checkpoint between, and max_restarts is "
            f"{config.max_restarts}: look in its logs for what ends it, and for too little memory, and start it anew."
        )

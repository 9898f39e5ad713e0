"""Restarts of a run from its last checkpoint, because resending single requests would not be safe."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar, cast

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, TagsContext
from prefect.exceptions import Abort
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tqdm import tqdm

from blocks.errors import LostRunError, RolledBackError, ServiceLostError, UnreachableError
from blocks.terminal import escape_terminal
from flows.config.base import RunConfig
from flows.monitoring.interrupts import RunCancelled, raise_if_restarted_after_cancel
from flows.runs.blocks import storage_of
from flows.runs.checkpoints.approval import decide
from flows.runs.result import TrainResult, as_state
from flows.runs.start.existing_run import settle_run_name
from tasks.common.internals.prefect import deferred_suspension
from tasks.common.service_errors import TRANSIENT_ERRORS
from tasks.training.checkpoints import resumable, step_of

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0


def run_with_restarts(config: RunConfig, attempt: Callable[[Sequence[str]], T]) -> T:
    """Run to the end; if the service is lost or a guard rolls back, reopen the run at its last checkpoint.

    Args:
        attempt: Opens the run and trains it to the end; receives the reasons for all restarts so far.

    Returns:
        Result of the successful attempt; if the run is cancelled in the UI, a Prefect Cancelled state.

    Raises:
        ConfigError, ServiceError, StorageError: See `settle_run_name`.
        LostRunError, Abort: Another process has taken over the run; see `leave_state_to_successor`.
        UnreachableError: The service or MLflow was unreachable in the first attempt.
        ServiceLostError, UnreachableError: More than `max_restarts` consecutive attempts without a new checkpoint ended
            because the service was lost, or because the service or MLflow was unreachable.
        ServiceLostError: The flow run crashed more than `max_restarts` times without a new checkpoint.
    """
    settle_run_name(config)
    return _run_with_restarts(config, attempt)


def _run_with_restarts(config: RunConfig, attempt: Callable[[Sequence[str]], T]) -> T:
    """Do the work of `run_with_restarts` once the run name is settled."""
    reasons: list[str] = []
    num_in_a_row = 0
    records = _records(config)
    step = _last_step(records)
    _reject_endless_crashes(config, records)
    while True:
        try:
            # Clear the tags: a tagged task first requests a concurrency slot, and fails if the Prefect server is down.
            with TagsContext(current_tags=set()), leave_state_to_successor(), deferred_suspension():
                raise_if_restarted_after_cancel()
                return attempt(tuple(reasons))
        except RunCancelled as cancelled:
            return cast(T, Cancelled(message=str(cancelled)))
        except RolledBackError as error:  # terminates, because each rollback skips another step
            reasons.append(str(error))
            tqdm.write(escape_terminal(f"Restarting {config.run_name}: {error}"), file=sys.stderr)
        except (UnreachableError, ServiceLostError) as error:
            if isinstance(error, UnreachableError) and not reasons:
                raise  # in the first attempt, a wrong address is more likely than a restarting server
            before, step = step, _last_step(_records(config))
            num_in_a_row = num_in_a_row + 1 if step == before else 1
            if num_in_a_row > config.max_restarts:
                raise
            reasons.append(f"after step {step}: {error}")
            pause_s = min(2.0**num_in_a_row, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            text = f"{error} Resuming {config.run_name} from the last checkpoint in {pause_s:.0f} s."
            get_run_logger().warning("%s", text)
            tqdm.write(escape_terminal(text), file=sys.stderr)
            time.sleep(pause_s)


def run_with_approval(config: RunConfig, attempt: Callable[[Sequence[str]], TrainResult]) -> TrainResult:
    """Run to the end as `run_with_restarts`; if a person has to approve the promotion, ask, and promote or refuse.

    A child flow run asks nobody: its parent reads the request in the result.

    Returns:
        Result of the run, in a named Prefect state if it stopped early or was not promoted.

    Raises:
        Pause: The flow run is suspended until a person decides in the Prefect UI.
    """
    result = run_with_restarts(config, attempt)
    if not isinstance(result, TrainResult):  # the state of a cancelled run
        return result
    context = FlowRunContext.get()
    is_child = bool(context and context.flow_run and context.flow_run.parent_task_run_id)
    if result.approval_request and not is_child and decide(result.approval_request, config):
        # `decide` has recorded the decision in the run's directory. When the finished run is opened again, it reads the
        # decision and promotes the checkpoint or not. `if_exists`, settled above, must not delete the run before that.
        decided = _run_with_restarts(config, attempt)
        if not isinstance(decided, TrainResult):
            return decided
        result = replace(decided, resumed_from=result.resumed_from)
    return as_state(result)


@contextmanager
def leave_state_to_successor() -> Iterator[None]:
    """Report no state to Prefect if another process has taken over the run together with its flow run.

    A process that was stopped for so long that it counted as crashed, such as on a laptop that was asleep, shares its
    flow run with the process of the restart.

    Raises:
        LostRunError: Another process has taken over the run, with a flow run of its own.
        Abort: Another process has taken over the run and the flow run; Prefect then ends this process without reporting
            its state.
    """
    try:
        yield
    except LostRunError as error:
        if not _has_successor():
            raise
        get_run_logger().error("%s The state of the flow run is left to that process.", error)
        raise Abort(str(error)) from error


def _has_successor() -> bool:
    """Return whether Prefect has started the current flow run once more since this process entered it."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    with suppress(*TRANSIENT_ERRORS), get_client(sync_client=True) as client:
        return client.read_flow_run(context.flow_run.id).run_count > context.flow_run.run_count
    return False


def _records(config: RunConfig) -> list[CheckpointRecord]:
    """Return the run's checkpoints with weights and optimizer state, newest first."""
    return resumable(storage_of(config).run_directory(config.run_name))


def _last_step(records: Sequence[CheckpointRecord]) -> int:
    return step_of(records[0]) if records else 0


def _reject_endless_crashes(config: RunConfig, records: Sequence[CheckpointRecord]) -> None:
    """Fail a flow run that crashes repeatedly, because the run itself may be the cause.

    Raises:
        ServiceLostError: The flow run restarted more than `max_restarts` times without a new checkpoint.
    """
    own = [record for record in records if record.get("flow_run_id", None) == flow_run.get_id()]
    num_at_checkpoint = int(own[0].get("flow_run_count", 1)) if own else 1
    num_in_a_row = (flow_run.get_run_count() or 1) - num_at_checkpoint - _num_suspensions()
    if num_in_a_row > config.max_restarts:
        raise ServiceLostError(
            f"The flow run restarted {num_in_a_row} times without a new checkpoint, but max_restarts is "
            f"{config.max_restarts}: check its logs and its memory use for the cause, then start the run again."
        )


def _num_suspensions() -> int:
    """Return how often the current flow run was suspended; it starts once more after each suspension."""
    context = FlowRunContext.get()
    return len(context.flow_run.empirical_policy.pause_keys or ()) if context and context.flow_run else 0

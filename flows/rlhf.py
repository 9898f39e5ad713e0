"""RLHF: a supervised warm start, a reward model from comparisons, and reinforcement learning with its scores.

tinker-flows run rlhf --config examples/rlhf.yaml
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.rlhf:rlhf", "flows.config.rlhf:RlhfConfig", __doc__)

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar, cast

from prefect import flow
from prefect.exceptions import CancelledRun
from prefect.states import Cancelled

from blocks.errors import ConfigError
from flows.config.base import RunConfig
from flows.config.dpo import DpoConfig
from flows.config.rlhf import RlhfConfig
from flows.config.train import BudgetConfig, SftConfig, TrainConfig
from flows.dpo import dpo
from flows.monitoring.progress import step_callback
from flows.rl import rl
from flows.runs.blocks import storage_of
from flows.runs.checkpoints.approval import ApprovalRequest, decide
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint
from flows.runs.result import TrainResult, as_state
from flows.runs.retries import leave_state_to_successor
from flows.runs.rights import apply_rights
from flows.sft import sft
from tasks.reports.tables import is_bookkeeping

C = TypeVar("C", bound=TrainConfig)


@flow(name="rlhf", flow_run_name="{config.run_name}", on_running=[apply_rights])
def rlhf(config: RlhfConfig) -> TrainResult:
    """Train a policy against a reward model or a judge, with one run per stage; a finished stage is not repeated.

    Returns:
        Result of the policy stage, or of an earlier stage that ended the flow through its budget, its promotion
        gate, a person's refusal or a missing approval. If a stage is cancelled, a Prefect Cancelled state.
    """
    with leave_state_to_successor():
        try:
            return as_state(_run_stages(config))
        except CancelledRun as cancelled:
            return cast(TrainResult, Cancelled(message=str(cancelled)))


def _run_stages(config: RlhfConfig) -> TrainResult:
    """Run the stages in order; return the result of the last stage, or of the stage that ended the flow."""
    start = reward = ""
    finished: list[TrainResult] = []
    if config.warm_start:
        warm_start = within_budget(config.warm_start_stage(), config.budget, finished)
        result = _with_approval(config, warm_start, lambda: sft(warm_start))
        if _is_final(result):
            return result
        finished.append(result)
        start = _weights(warm_start, result)
    if config.judge is None:
        stage = within_budget(config.reward_stage(), config.budget, finished)
        result = _with_approval(config, stage, lambda: dpo(stage) if isinstance(stage, DpoConfig) else sft(stage))
        if _is_final(result):
            return result
        finished.append(result)
        reward = _weights(stage, result)
    policy = within_budget(config.policy_stage(start, reward), config.budget, finished)
    return _with_approval(config, policy, lambda: rl(policy), is_last=True)


def within_budget(stage: C, budget: BudgetConfig, finished: Sequence[TrainResult]) -> C:
    """Return a stage whose budget is the rest of the common budget; without a common budget, the unchanged stage.

    Raises:
        ConfigError: The finished stages have spent the budget, or their cost in dollars is unknown.
    """
    if budget == BudgetConfig():
        return stage
    remaining: dict[str, float] = {}
    for name in ("hours", "usd"):
        limit: float | None = getattr(budget, name)
        if limit is None:
            continue
        for result in finished:
            if f"cost/{name}" not in result.metrics:
                raise ConfigError(
                    f"The cost of {result.run_name} in dollars is unknown, because no price was known when it ran: "
                    "remove budget.usd, or choose another run_name."
                )
        spent = sum(result.metrics[f"cost/{name}"] for result in finished)
        if spent >= limit:
            raise ConfigError(
                f"The stages before {stage.run_name} have spent {spent:.6g} of budget.{name}={limit:g}: raise it to "
                "continue."
            )
        remaining[name] = limit - spent
    return stage.model_copy(update={"budget": budget.model_copy(update=remaining)})


def _with_approval(
    config: RlhfConfig, stage: RunConfig, run_stage: Callable[[], TrainResult], *, is_last: bool = False
) -> TrainResult:
    """Run a stage; if needed, have a person approve its registration or the start of the next stage.

    Raises:
        Pause: The flow run is suspended until a person decides in the Prefect UI.
    """
    # A sweep judges its trials by the last stage alone, so earlier stages do not call its callback.
    with nullcontext() if is_last else step_callback(None):
        result = run_stage()
    if result.approval_request:
        # The repeated stage reads the recorded decision, and registers the checkpoint or refuses.
        return run_stage() if decide(result.approval_request, stage) is not None else result
    # A stage that needs approval itself has asked before registering its checkpoint. That answer also allows the next
    # stage.
    if not config.needs_approval or _is_final(result) or is_last or stage.needs_approval:
        return result
    rows = tuple(row for row in result.held_out if not is_bookkeeping(row.metric))
    question = f"Continue with the stage after {stage.run_name}?"
    approval = decide(ApprovalRequest(stage.run_name, result.num_steps, result.state_path, question, rows), stage)
    if approval is None:
        return replace(result, not_promoted=f"{stage.run_name} waits for approval: run this rlhf again in a terminal.")
    if approval.decision == "approve":
        return result
    return replace(result, not_promoted=f"{stage.run_name} ends the flow: a person decided {approval.describe()!r}.")


def _is_final(result: TrainResult) -> bool:
    """Return whether a stage was stopped or not promoted, so that later stages must not build on it."""
    return bool(result.stopped or result.not_promoted)


def _weights(config: SftConfig | DpoConfig, result: TrainResult) -> str:
    """Return the path of the stage's best weights if it keeps them, else of its last weights."""
    if config.keep_best is None:
        return result.state_path
    return find_checkpoint(f"{config.run_name}@best", storage_of(config)).path

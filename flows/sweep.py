"""Sweep: run one flow with varied config values and compare the results.

python -m flows.sweep --config examples/sweep.yaml concurrency=4
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.sweep:sweep", "flows.sweeps.config:SweepConfig", __doc__, show="flows.sweep:show_sweep")

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from functools import partial
from typing import cast

from prefect import flow
from prefect.context import TagsContext
from prefect.states import Cancelled
from rich.table import Table

from blocks.storage import RunDirectory
from blocks.terminal import TextConsole
from flows.monitoring.interrupts import RunCancelled, raise_if_restarted_after_cancel
from flows.runs.blocks import storage_of
from flows.runs.retries import leave_state_to_successor
from flows.runs.rights import apply_rights
from flows.sweeps.backends.cluster import TrialCluster
from flows.sweeps.backends.deployment import TrialDeployment, check_deployment
from flows.sweeps.backends.process import TrialProcess
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import SweepPlan, make_plan
from flows.sweeps.protocols import Runner
from flows.sweeps.pruning import Pruner
from flows.sweeps.record import SweepLog, check_sweep, open_sweep_log
from flows.sweeps.result import SweepResult, finish_sweep
from flows.sweeps.runner import TrialExecutor, run_trials, shared_service
from flows.sweeps.scheduler import Schedule
from tasks.training.tracking.metric_names import logged_name


@flow(name="sweep", flow_run_name="{config.run_name}", on_running=[apply_rights])
def sweep(config: SweepConfig) -> SweepResult:
    """Run a flow at points of a search space and compare the results; a stopped sweep resumes."""
    plan = make_plan(config)
    with leave_state_to_successor(), storage_of(plan.base_config).run_directory(config.run_name) as directory:
        check_sweep(directory, plan)
        schedule = Schedule(plan, directory)
        try:
            raise_if_restarted_after_cancel()
            with open_sweep_log(plan, directory) as log:
                if schedule.num_remaining:
                    _run_remaining(plan, directory, log, schedule)
                # Without tags: a tagged task asks the server for a slot before it starts, and fails if the server is
                # unavailable.
                with TagsContext(current_tags=set()):
                    return finish_sweep(plan, directory, log, schedule.trials)
        except RunCancelled as cancelled:
            return cast(SweepResult, Cancelled(message=str(cancelled)))


def _run_remaining(plan: SweepPlan, directory: RunDirectory, log: SweepLog, schedule: Schedule) -> None:
    config, metric = plan.config, logged_name(plan.config.metric)
    if config.deployment:
        check_deployment(config.deployment)
        new_runner: partial[Runner] = partial(TrialDeployment, config.deployment, log, metric)
    elif config.cluster:
        new_runner = partial(TrialCluster, config.cluster, config.flow, log, metric)
    else:
        new_runner = partial(TrialProcess, config.flow)
    pruning = Pruner(config.prune, config.mode) if config.prune else None
    with shared_service(plan.base_config, config.run_name, directory.location) as base_url:
        run_trials(TrialExecutor(plan, log, base_url, pruning, new_runner), schedule, config.concurrency)


def show_sweep(result: SweepResult) -> None:
    """Print the best points and the locations of the report and the MLflow run."""
    table = Table(title=f"{result.run_name}: the best of {result.num_points} points")
    for column in result.columns:
        table.add_column(column, overflow="fold")
    for row in result.rows:
        table.add_row(*row)
    console = TextConsole()
    console.print(table)
    for name, value in (
        ("trials", f"{result.num_completed} completed, {result.num_pruned} pruned, {result.num_failed} failed"),
        ("best config", result.best_config),
        ("report", result.report),
        ("MLflow run", f"{result.mlflow_run_id} at {result.tracking_uri}"),
    ):
        console.print(f"{name:12} {value}")

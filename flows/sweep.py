"""A sweep: many runs of one flow, with other values of its config, and what comes of them.

python -m flows.sweep --config examples/sweep.yaml concurrency=4
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from functools import partial
from typing import cast

from prefect import flow
from prefect.context import TagsContext
from prefect.states import Cancelled
from rich.console import Console
from rich.table import Table

from blocks.storage import RunDirectory
from flows.blocks_of import storage_of
from flows.command_line import main
from flows.shared_service import shared_service
from flows.stop import CancelledInTheUI
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import SweepPlan, make_plan
from flows.sweeps.pruning import Pruning
from flows.sweeps.record import SweepLog, check_sweep, open_sweep_log
from flows.sweeps.result import SweepResult, conclude
from flows.sweeps.schedule import Schedule
from flows.sweeps.trial_cluster import TrialCluster
from flows.sweeps.trial_deployment import TrialDeployment, check_deployment
from flows.sweeps.trial_process import TrialProcess
from flows.sweeps.trials import Runner, Sweeping, run_trials


@flow(name="sweep", flow_run_name="{config.run_name}")
def sweep(config: SweepConfig) -> SweepResult:
    """Run a flow at every point of a space, from the start of the sweep or from where it stopped, and compare."""
    plan = make_plan(config)
    with storage_of(plan.base_config).run_directory(config.run_name) as directory:
        check_sweep(directory, plan)
        schedule = Schedule(plan, directory)
        try:
            with open_sweep_log(plan, directory) as log:
                if schedule.num_left:
                    _run_left(plan, directory, log, schedule)
                # A tagged task asks the server for a slot before it starts, and fails where the server is away.
                with TagsContext(current_tags=set()):
                    return conclude(plan, directory, log, schedule.trials)
        except CancelledInTheUI as cancelled:
            return cast(SweepResult, Cancelled(message=str(cancelled)))


def _run_left(plan: SweepPlan, directory: RunDirectory, log: SweepLog, schedule: Schedule) -> None:
    config = plan.config
    if config.deployment:
        check_deployment(config.deployment)
        new_runner: partial[Runner] = partial(TrialDeployment, config.deployment, log, config.metric)
    elif config.cluster:
        new_runner = partial(TrialCluster, config.cluster, config.flow, log, config.metric)
    else:
        new_runner = partial(TrialProcess, config.flow)
    pruning = Pruning(config.prune, config.mode) if config.prune else None
    with shared_service(plan.base_config, config.run_name, directory.location) as base_url:
        run_trials(Sweeping(plan, log, base_url, pruning, new_runner), schedule, config.concurrency)


def show_sweep(result: SweepResult) -> None:
    """Print the best points and where to look next."""
    table = Table(title=f"{result.run_name}: the best of {result.num_points} points")
    for column in result.columns:
        table.add_column(column, overflow="fold")
    for row in result.rows:
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for name, where in (
        ("trials", f"{result.num_completed} completed, {result.num_pruned} pruned, {result.num_failed} failed"),
        ("best config", result.best_config),
        ("report", result.report),
        ("MLflow run", f"{result.mlflow_run_id} at {result.tracking_uri}"),
    ):
        console.print(f"{name:12} {where}")


if __name__ == "__main__":
    main(sweep, SweepConfig, show=show_sweep)

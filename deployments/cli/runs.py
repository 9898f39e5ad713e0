"""Commands for runs: start, resume and inspect a run, or sweep over configs."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.cli.options import ConfigFile, Json, Method, Overrides, RunName, Storage, complete_run


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (run, resume, status, report, sweep):
        app.command(rich_help_panel="Runs")(command)


def run(
    method: Method,
    overrides: Overrides = None,
    config: ConfigFile = None,
    fields: Annotated[bool, typer.Option("--fields", help="List the config fields of the method and exit.")] = False,
) -> None:
    """Start a run, or resume it from its last checkpoint if the run name exists.

    Example: `tinker-flows run sft --config examples/sft.yaml run_name=mine learning_rate=1e-3`

    The run uses the Prefect server of PREFECT_API_URL and the Tinker service of TINKER_BASE_URL or TINKER_API_KEY. If
    no server or no service is set, the run starts a local Prefect server or a local engine. On Ctrl-C, the run
    finishes the current step, saves a checkpoint and exits.
    """
    from deployments.methods import find_method
    from flows.runs.cli import print_fields, start

    selected = find_method(method)
    if fields:
        print_fields(selected.config)
    else:
        start(selected.flow, selected.config, config, overrides or [])


def resume(run_name: RunName, overrides: Overrides = None, storage: Storage = "") -> None:
    """Resume a stopped or killed run with the config stored in its directory.

    Example: `tinker-flows resume mine budget.usd=20`

    Overrides may change fields that do not define what the run trains, such as budget.usd or base_url. They hold for
    this start; the next one uses the stored config again.
    """
    from deployments.methods import flow_of
    from deployments.run_lookup import find_run, resume_config
    from flows.runs.cli import run as run_flow
    from flows.runs.show import show_result

    method, config = resume_config(find_run(run_name, storage), overrides or [])
    show_result(run_flow(flow_of(method), config))


def status(
    run_name: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help="Show details of this run; default: list all runs.", show_default=False),
    ] = "",
    storage: Storage = "",
    as_json: Json = False,
) -> None:
    """List runs with state, steps, last checkpoint, metric, MLflow run and writing process.

    States: running; finished; stopped (Ctrl-C, cancelled or budget spent); failed (with a reason); killed (by kill -9
    or a machine failure); unknown (MLflow is unreachable); damaged (a file of the run is invalid); unreadable (its
    files cannot be read). `tinker-flows resume RUN` continues a run in every state but running, finished, damaged and
    unreadable.
    """
    from deployments.status import show_run, show_runs

    if run_name:
        show_run(run_name, storage, as_json)
    else:
        show_runs(storage, as_json)


def report(
    run_name: RunName,
    other: Annotated[
        str,
        typer.Argument(metavar="[OTHER]", help="Run to compare with.", show_default=False, autocompletion=complete_run),
    ] = "",
    storage: Storage = "",
    rebuild: Annotated[bool, typer.Option("--again", help="Rebuild an existing report from newer metrics.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Print the location of a run's HTML report; if the report is missing, build it from MLflow.

    Example: `tinker-flows report before after --open`

    With a second run, write a page that compares both runs: different settings, held-out metrics with intervals of the
    differences, curves and examples.
    """
    from deployments.run_lookup import compare_runs, report_of

    location = compare_runs(run_name, other, storage) if other else report_of(run_name, storage, rebuild=rebuild)
    typer.echo(location)
    if open_it:
        typer.launch(location)


def sweep(overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Run a method with many configs, compare the trials and report the best.

    Example: `tinker-flows sweep --config examples/sweep.yaml concurrency=4`

    Each trial is a run that `tinker-flows status` lists. The same command resumes a stopped sweep.
    `python -m flows.sweep --fields` lists the config fields.
    """
    from flows.runs.cli import start

    start("flows.sweep:sweep", "flows.sweeps.config:SweepConfig", config, overrides or [], "flows.sweep:show_sweep")

"""Commands around one run: start it, go on with it, see what it has become."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.cli.options import ConfigFile, Json, Method, Overrides, RunName, Storage


def add_to(app: typer.Typer) -> None:
    """Add this file's commands."""
    for command in (run, resume, status, report):
        app.command(rich_help_panel="Runs")(command)


def run(
    method: Method,
    overrides: Overrides = None,
    config: ConfigFile = None,
    fields: Annotated[bool, typer.Option("--fields", help="List the fields of the method's config, and end.")] = False,
) -> None:
    """Run a method, from its start or from its last checkpoint where the run name is there already.

    Example: `tinker-flows run sft --config examples/sft.yaml run_name=mine learning_rate=1e-4`

    It runs on the Prefect server of PREFECT_API_URL, or one of its own; on the Tinker service of TINKER_BASE_URL, or
    an engine of its own. Ctrl-C ends the step under way and saves it.
    """
    from deployments.methods import config_type_of, flow_of
    from flows.command_line import run as run_flow
    from flows.command_line import show_result
    from flows.config_file import describe_fields, load_config

    if fields:
        typer.echo("\n".join(describe_fields(config_type_of(method))))
        return
    flow = flow_of(method)
    show_result(run_flow(flow, load_config(config_type_of(method), config, overrides or [])))


def resume(run_name: RunName, overrides: Overrides = None, storage: Storage = "") -> None:
    """Go on with a run that was stopped or killed, from the config that its directory keeps.

    Fields that do not change what is trained may be given anew, as budget.usd=20 or base_url=local.
    """
    from deployments.methods import flow_of
    from deployments.recorded_run import config_to_go_on, recorded_run
    from flows.command_line import run as run_flow
    from flows.command_line import show_result

    method, config = config_to_go_on(recorded_run(run_name, storage), overrides or [])
    show_result(run_flow(flow_of(method), config))


def status(
    run_name: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run, to see all of it; without one, all runs.", show_default=False)
    ] = "",
    storage: Storage = "",
    as_json: Json = False,
) -> None:
    """List the runs of a storage: state, steps, last checkpoint, metric, MLflow run, and who writes them now.

    The states: running; finished; stopped, by Ctrl-C, a cancel or its budget; failed, with a sentence; killed, which
    left no word. All but finished ones go on with `tinker-flows resume RUN`.
    """
    from deployments.status import show_run, show_runs

    if run_name:
        show_run(run_name, storage, as_json)
    else:
        show_runs(storage, as_json)


def report(
    run_name: RunName,
    storage: Storage = "",
    again: Annotated[bool, typer.Option("--again", help="Make it anew, for a run that went on since.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Print where the report of a run is, and make it from what MLflow has where it is missing."""
    from deployments.run_report import report_of

    where = report_of(run_name, storage, again=again)
    typer.echo(where)
    if open_it:
        typer.launch(where)

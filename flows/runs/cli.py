"""Command line of a flow: config file, overrides, Prefect server, and one-sentence errors."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from prefect import Flow, State
from prefect.exceptions import CancelledRun, PrefectException
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.table import Table

from blocks.console import TextConsole
from blocks.errors import ServiceError, TinkerFlowsError, reason, traceback_is_requested
from blocks.processes import local_prefect_server, prefect_server_env
from flows.config.base import Config, RunConfig
from flows.config.loader import describe_fields, load_config
from flows.monitoring.drain import deliver_events, wait_until_recorded
from flows.monitoring.events import heartbeats
from flows.monitoring.progress import method_figures
from flows.runs.result import TrainResult
from objectives.errors import ObjectiveError
from tasks.reports.summary import describe_cost, storage_option
from tasks.reports.tables import COLUMNS, Control, format_row, held_out_table, is_bookkeeping, term_rows

R = TypeVar("R")


def main(
    flow: Flow[..., Any],
    config_type: type[Config],
    argv: Sequence[str] | None = None,
    show: Callable[[Any], None] | None = None,
) -> None:
    """Run a flow from the command line; exit with 0, with 1 after a known error, or with 130 after Ctrl-C.

    Args:
        show: Prints the flow's result; `show_result` by default.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{flow.name}",
        description=(flow.fn.__doc__ or "").strip(),
        epilog="fields:\n" + "\n".join(describe_fields(config_type)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="YAML file with config fields")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="config fields that override the file")
    arguments = parser.parse_args(argv)
    exit_on_error(
        lambda: (show or show_result)(run(flow, load_config(config_type, arguments.config, arguments.overrides)))
    )


def exit_on_error(action: Callable[[], None]) -> None:
    """Run an action; exit with a one-sentence message and status 1 after a known error, with 130 after Ctrl-C."""
    try:
        action()
    except (TinkerFlowsError, ObjectiveError) as error:
        if traceback_is_requested():
            traceback.print_exc()
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, CancelledRun):
        print("Stopped. Run the same command again to resume from the last checkpoint.", file=sys.stderr)
        sys.exit(130)


def run(flow: Flow[..., R], config: Config) -> R:
    """Run a flow against the configured Prefect server, or against a local one for the duration of the run."""
    silence_console_logs()
    with _interrupts_of_deletable_run(config):
        return _run(flow, config)


@contextmanager
def _interrupts_of_deletable_run(config: Config) -> Iterator[None]:
    """After Ctrl-C, warn that the same command would delete a run with `if_exists: delete`, and exit with 130."""
    try:
        yield
    except (KeyboardInterrupt, CancelledRun):
        if not (isinstance(config, RunConfig) and config.if_exists == "delete"):
            raise
        print(
            f"Stopped. `tinker-flows resume {config.run_name}` resumes from the last checkpoint; the same command "
            "would delete the run, because if_exists is 'delete'.",
            file=sys.stderr,
        )
        sys.exit(130)


def _run(flow: Flow[..., R], config: Config) -> R:
    if PREFECT_API_URL.value():
        return _delivered(flow, config).result()
    # Not Prefect's ephemeral server, which silently loses most task runs of a real run.
    with local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        state = _delivered(flow, config)
        assert state.state_details.flow_run_id is not None
        wait_until_recorded(state.state_details.flow_run_id, "report" if state.is_completed() else None)
        return state.result()


def _delivered(flow: Flow[..., R], config: Config) -> State[R]:
    """Run a flow and deliver its events, also after Ctrl-C, while its server is up.

    Raises:
        ServiceError: The Prefect server is not usable.
    """
    try:
        with heartbeats():
            return cast("State[R]", flow(config, return_state=True))
    except (httpx.HTTPError, PrefectException, RuntimeError, ValueError) as error:  # the flow's errors are in its state
        raise ServiceError(
            f"The Prefect server at {PREFECT_API_URL.value()} could not be used ({reason(error)}): set PREFECT_API_URL "
            "to a running server and run the same command again to resume from the last checkpoint."
        ) from error
    finally:
        deliver_events()


def silence_console_logs() -> None:
    """Limit the terminal to the progress bar and final messages; the Prefect UI has all logs and tracebacks."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.CRITICAL)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # MLflow's client retries requests for minutes; the run itself says that the store does not respond.
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def show_result(result: TrainResult, control: Mapping[str, Control] | None = None) -> None:
    """Print the terms, the held-out data before and after, the cost, and where weights, report and UIs are.

    Args:
        control: held-out values of a run without the terms, to print beside those of this run.
    """
    console = TextConsole()
    title = f"{result.run_name}: {result.num_steps} steps"
    console.print(_table(title, COLUMNS, [format_row(row) for row in term_rows(result.metrics)]))
    held_out = [row for row in result.held_out if not is_bookkeeping(row.metric)]
    if held_out:
        console.print(_table("", *held_out_table(held_out, control)))
        if any(not math.isnan(row.after.half_width) for row in result.held_out):
            console.print("±: 95 % interval over the held-out batches; of a change or an effect, over paired batches")
    if result.stopped:
        console.print(result.stopped)
    elif result.not_promoted:
        console.print(result.not_promoted)
    elif result.resumed_from == result.num_steps:
        console.print("This run had already finished; choose another run_name to train again.")
    figures = [figure for figure in method_figures(result.metrics) if not figure.startswith("$")]
    if figures:
        console.print(f"last batch   {', '.join(figures)}")
    for warning in result.warnings:
        console.print(f"warning      {warning}")
    console.print(f"cost         {describe_cost(result.metrics)}{_pace(result)}")
    console.print(f"weights      {result.state_path}")
    console.print(f"report       {result.report}")
    console.print(f"Prefect UI   {_prefect_ui(result)}")
    console.print(f"MLflow UI    {_mlflow_ui(result)}")
    storage = storage_option(result.run_name, result.directory)
    console.print(f'sample       tinker-flows sample {shlex.quote(result.run_name)}@final "PROMPT"{storage}')


def _pace(result: TrainResult) -> str:
    """Steps per minute of the whole run; empty if unknown."""
    minutes = 60 * result.metrics.get("cost/hours", 0.0)
    return f", {result.num_steps / minutes:.3g} steps per minute" if minutes else ""


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _prefect_ui(result: TrainResult) -> str:
    page = f"/runs/flow-run/{result.flow_run_id}"
    if api := PREFECT_API_URL.value():
        return api.removesuffix("/api") + page
    database = prefect_server_env()["PREFECT_API_DATABASE_CONNECTION_URL"]
    command = f"PREFECT_API_DATABASE_CONNECTION_URL={database} {sys.executable} -m prefect server start"
    return f"{command}\n             then open http://127.0.0.1:4200{page}"


def _mlflow_ui(result: TrainResult) -> str:
    page = f"/#/experiments/{result.experiment_id}/runs/{result.mlflow_run_id}"
    if result.tracking_uri.startswith("http"):
        return result.tracking_uri.rstrip("/") + page
    command = f"{sys.executable} -m mlflow ui --backend-store-uri {result.tracking_uri}"
    return f"{command}\n             then open http://127.0.0.1:5000{page}"

"""Run a flow from a terminal: config file, overrides, a Prefect server, and errors as one sentence."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from prefect import Flow, State
from prefect.exceptions import CancelledRun, PrefectException
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console
from rich.table import Table

from blocks.errors import ServiceError, TinkerFlowsError, reason
from blocks.processes import local_prefect_server, prefect_server_env
from flows.config import Config
from flows.config_file import describe_fields, load_config
from flows.heartbeat import heartbeats
from flows.recorded import deliver_events, wait_until_recorded
from flows.result import TrainResult
from objectives.errors import ObjectiveError
from tasks.term_table import COLUMNS, cells, term_rows

R = TypeVar("R")


def main(
    flow: Flow[..., Any],
    config_type: type[Config],
    argv: Sequence[str] | None = None,
    show: Callable[[Any], None] | None = None,
) -> None:
    """The command line of a flow; exits 0, 1 for what the user can mend, or 130 after Ctrl-C.

    Args:
        show: prints what the flow returns; `show_result` unless given.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{flow.name}",
        description=(flow.fn.__doc__ or "").strip(),
        epilog="fields:\n" + "\n".join(describe_fields(config_type)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="YAML file with the fields of the config")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="dotted fields that override the file's")
    arguments = parser.parse_args(argv)
    exit_with_a_sentence(
        lambda: (show or show_result)(run(flow, load_config(config_type, arguments.config, arguments.overrides)))
    )


def exit_with_a_sentence(action: Callable[[], None]) -> None:
    """Run what a terminal asked for; what the user can mend ends it with a sentence and status 1, a stop with 130."""
    try:
        action()
    except (TinkerFlowsError, ObjectiveError) as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, CancelledRun):
        print("Stopped. The same command again resumes from the last checkpoint.", file=sys.stderr)
        sys.exit(130)


def run(flow: Flow[..., R], config: Config) -> R:
    """Run a flow against the Prefect server in force, or one of its own for as long as it takes."""
    keep_prefect_off_the_terminal()
    if PREFECT_API_URL.value():
        return _delivered(flow, config).result()
    # Never Prefect's ephemeral server: it loses most task runs of a real run without a word.
    with local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        state = _delivered(flow, config)
        assert state.state_details.flow_run_id is not None
        wait_until_recorded(state.state_details.flow_run_id, "report" if state.is_completed() else None)
        return state.result()


def _delivered(flow: Flow[..., R], config: Config) -> State[R]:
    """The end of a flow run whose events have left, also after Ctrl-C, while its server is there to take them.

    Raises:
        ServiceError: the Prefect server could not be used.
    """
    try:
        with heartbeats():
            return cast("State[R]", flow(config, return_state=True))
    except (httpx.HTTPError, PrefectException, RuntimeError, ValueError) as error:  # the flow's own are in its state
        raise ServiceError(
            f"The Prefect server at {PREFECT_API_URL.value()} could not be used ({reason(error)}): set PREFECT_API_URL "
            "to one that runs and start the same command again; it resumes from the last checkpoint."
        ) from error
    finally:
        deliver_events()


def keep_prefect_off_the_terminal() -> None:
    """A bar and one sentence are what a terminal is for; the Prefect UI has every line and traceback."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.CRITICAL)
    logging.getLogger("mlflow").setLevel(logging.WARNING)


def show_result(result: TrainResult) -> None:
    """Print the table of terms and where to look next."""
    table = Table(title=f"{result.run_name}: {result.num_steps} steps")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in term_rows(result.metrics):
        table.add_row(*cells(row))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if result.stopped:
        console.print(result.stopped)
    elif result.not_promoted:
        console.print(result.not_promoted)
    elif result.resumed_from == result.num_steps:
        console.print("This run was finished before; choose another run_name to train again.")
    for key in sorted(result.metrics):
        if key.startswith("test/") or key.endswith("/skipped"):
            console.print(f"{key:12} {result.metrics[key]:.4f}")
    console.print(f"weights      {result.state_path}")
    console.print(f"report       {result.report}")
    console.print(f"Prefect UI   {_prefect_ui(result)}")
    console.print(f"MLflow UI    {_mlflow_ui(result)}")


def _prefect_ui(result: TrainResult) -> str:
    page = f"/runs/flow-run/{result.flow_run_id}"
    if api := PREFECT_API_URL.value():
        return api.removesuffix("/api") + page
    database = prefect_server_env()["PREFECT_API_DATABASE_CONNECTION_URL"]
    command = f"PREFECT_API_DATABASE_CONNECTION_URL={database} {sys.executable} -m prefect server start"
    return f"{command}\n             then http://127.0.0.1:4200{page}"


def _mlflow_ui(result: TrainResult) -> str:
    page = f"/#/experiments/{result.experiment_id}/runs/{result.mlflow_run_id}"
    if result.tracking_uri.startswith("http"):
        return result.tracking_uri.rstrip("/") + page
    command = f"{sys.executable} -m mlflow ui --backend-store-uri {result.tracking_uri}"
    return f"{command}\n             then http://127.0.0.1:5000{page}"

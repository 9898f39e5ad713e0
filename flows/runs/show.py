"""Result of a run on the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from prefect.settings import PREFECT_API_URL
from rich.table import Table

from blocks.files.local import home
from blocks.servers.processes import running_prefect_server
from blocks.terminal import TextConsole
from blocks.urls import hide_credentials
from flows.monitoring.progress import method_figures
from flows.runs.result import TrainResult
from tasks.reports.summary import describe_cost, storage_option
from tasks.reports.tables import Control, describe_intervals, held_out_table, is_bookkeeping, term_table

# Serves the databases of the project home, with a login.
_UP = "tinker-flows up --no-engine"


def show_result(result: TrainResult, control: Mapping[str, Control] | None = None) -> None:
    """Print the terms, the held-out data before and after, the cost, and where weights, report and UIs are.

    Args:
        control: held-out values of a run without the terms, to print alongside the values of this run.
    """
    console = TextConsole()
    title = f"{result.run_name}: {result.num_steps} steps; {result.terms_title}"
    console.print(_table(title, *term_table(result.terms)))
    held_out = [row for row in result.held_out if not is_bookkeeping(row.metric)]
    if held_out:
        console.print(_table("", *held_out_table(held_out, control)))
        for note in (describe_intervals(held_out), *(row.note for row in held_out)):
            if note:
                console.print(note)
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
    console.print(f"cost         {describe_cost(result.metrics)}")
    console.print(f"weights      {result.state_path}")
    console.print(f"report       {result.report}")
    console.print(f"Prefect UI   {_prefect_ui(result)}")
    console.print(f"MLflow UI    {_mlflow_ui(result)}")
    name, storage = shlex.quote(result.run_name), storage_option(result.run_name, result.directory)
    if result.stopped:
        limit = "budget.usd" if "budget.usd" in result.stopped else "budget.hours"
        console.print(f"resume       tinker-flows resume {name} {limit}=MORE{storage}")
    weights = name if result.stopped else f"{name}@final"
    console.print(f'sample       tinker-flows sample {weights} "PROMPT"{storage}')


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _prefect_ui(result: TrainResult) -> str:
    page = f"/runs/flow-run/{result.flow_run_id}"
    server = None if PREFECT_API_URL.value() else running_prefect_server()
    if api := server.url if server else PREFECT_API_URL.value():
        return hide_credentials(api).removesuffix("/api") + page
    ui = "http://127.0.0.1:4200"
    return f"{_UP}\n             then log in at {ui} and open {ui}{page}"


def _mlflow_ui(result: TrainResult) -> str:
    page = f"/#/experiments/{result.experiment_id}/runs/{result.mlflow_run_id}"
    if result.tracking_uri.startswith("http"):
        return result.tracking_uri.rstrip("/") + page
    is_in_home = result.tracking_uri == f"sqlite:///{home() / 'mlflow.db'}"
    if is_in_home and (server := running_prefect_server()):
        return server.mlflow_url + page
    command = _UP if is_in_home else f"{sys.executable} -m mlflow ui --backend-store-uri {result.tracking_uri}"
    return f"{command}\n             then open http://127.0.0.1:5000{page}"

"""Run a flow from a terminal: config file, overrides, a Prefect server, and errors as one sentence."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from prefect import Flow, State
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from blocks.errors import ConfigError, TinkerFlowsError
from blocks.processes import local_prefect_server, prefect_server_env
from flows.config import RunConfig
from flows.recorded import wait_until_recorded
from flows.result import TrainResult
from objectives.errors import ObjectiveError
from tasks.term_table import COLUMNS, cells, term_rows

C = TypeVar("C", bound=RunConfig)


def main(flow: Flow[..., TrainResult], config_type: type[RunConfig], argv: Sequence[str] | None = None) -> None:
    """The command line of a flow; exits 0, 1 for what the user can mend, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{flow.name}",
        description=(flow.fn.__doc__ or "").strip(),
        epilog="A list entry is addressed by its name or number: objective.regularizers.logic.weight=0.2",
    )
    parser.add_argument("--config", type=Path, help="YAML file with the fields of the config")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="dotted fields that override the file's")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(config_type, arguments.config, arguments.overrides)
        show_result(run(flow, config))
    except (TinkerFlowsError, ObjectiveError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("Stopped. The same command again resumes from the last checkpoint.", file=sys.stderr)
        sys.exit(130)


def load_config(config_type: type[C], path: Path | None, overrides: Sequence[str]) -> C:
    """A config from a YAML file and `field=value` overrides.

    Raises:
        ConfigError: the file or a field cannot be read, is unknown or out of its limits.
    """
    fields: dict[str, Any] = _read_yaml(path) if path else {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"The argument {override!r} is not of the form field=value, as in learning_rate=1e-4.")
        _set(fields, key.split("."), yaml.safe_load(value), key)
    try:
        return config_type.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"The config is wrong: {_explain(error, fields, config_type)}.") from error


def run(flow: Flow[..., TrainResult], config: RunConfig) -> TrainResult:
    """Run a flow against the Prefect server in force, or one of its own for as long as it takes."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            # A bar and one sentence are what a terminal is for; the Prefect UI has every line and traceback.
            handler.setLevel(logging.CRITICAL)
    with _prefect_server():
        state = cast("State[TrainResult]", flow(config, return_state=True))
        assert state.state_details.flow_run_id is not None
        wait_until_recorded(state.state_details.flow_run_id)
        return state.result()


def show_result(result: TrainResult) -> None:
    """Print the table of terms and where to look next."""
    table = Table(title=f"{result.run_name}: {result.num_steps} steps")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in term_rows(result.metrics):
        table.add_row(*cells(row))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
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


@contextlib.contextmanager
def _prefect_server() -> Iterator[None]:
    """Never Prefect's ephemeral server: it loses most task runs of a real run without a word."""
    if PREFECT_API_URL.value():
        yield
        return
    with local_prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        yield


def _explain(error: ValidationError, fields: Any, config_type: type[RunConfig]) -> str:
    """The first thing wrong, with list entries by their names."""
    first = error.errors(include_url=False)[0]
    where = []
    for part in first["loc"]:
        named = isinstance(fields, list) and isinstance(part, int) and part < len(fields)
        fields = fields[part] if named else fields.get(part) if isinstance(fields, dict) else None
        where.append(str(fields.get("name", part)) if named and isinstance(fields, dict) else str(part))
    path = ".".join(where)
    if first["type"] == "missing":
        return f"{path!r} is missing"
    if first["type"] == "extra_forbidden":
        known = f"; the fields are {', '.join(config_type.model_fields)}" if len(where) == 1 else ""
        return f"there is no field {path!r}{known}"
    return f"{path!r} is {first['input']!r}, but {first['msg'][:1].lower()}{first['msg'][1:]}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"The config file {path} could not be read ({error.strerror}): check --config.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The config file {path} is not YAML ({' '.join(str(error).split())}): mend it.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"The config file {path} holds a {type(fields).__name__} where fields are expected.")
    return fields


def _set(fields: Any, path: Sequence[str], value: Any, key: str) -> None:
    head, *rest = path
    if isinstance(fields, list):
        names = [str(item.get("name")) if isinstance(item, Mapping) else "" for item in fields]
        index = int(head) if head.isdigit() else names.index(head) if head in names else -1
        if not 0 <= index < len(fields):
            raise ConfigError(
                f"The argument {key}=... names no entry {head!r}; there are {', '.join(names) or 'none'}."
            )
        if rest:
            _set(fields[index], rest, value, key)
        else:
            fields[index] = value
    elif isinstance(fields, dict):
        if rest:
            _set(fields.setdefault(head, {}), rest, value, key)
        else:
            fields[head] = value
    else:
        raise ConfigError(f"The argument {key}=... goes into {head!r}, whose parent is the plain value {fields!r}.")

"""Command line of a flow: config file, overrides, Prefect server, and one-sentence errors.

This module imports Prefect and the parts of a run in the functions that need them, so that `--help` responds at once
and a Prefect server starts while they are imported.
"""

from __future__ import annotations

import argparse
import gc
import logging
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from blocks.errors import ConfigError, ExplainedInterrupt, TinkerFlowsError, traceback_is_requested
from blocks.garbage_collection import no_collections
from blocks.prefect_errors import check_prefect_url, prefect_failures
from blocks.servers.processes import PrefectServer, running_prefect_server, starting_prefect_server
from blocks.terminal import escape_terminal, print_notice
from objectives.config.import_path import import_path
from objectives.errors import ObjectiveError, exit_call

if TYPE_CHECKING:
    from prefect import Flow, State

    from flows.config.base import Config

R = TypeVar("R")

SHOW_RESULT = "flows.runs.show:show_result"


class _Parser(argparse.ArgumentParser):
    """Parser whose errors quote arguments with control characters escaped."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_terminal(message))


def main(
    flow: str,
    config: str,
    description: str | None,
    show: str = SHOW_RESULT,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run a flow from the command line; exit with 0, with 1 after a known error, or with 130 after Ctrl-C.

    Args:
        flow: Import path of the flow, `module:name`.
        config: Import path of the class of its parameter `config`.
        description: Text of `--help`.
        show: Import path of the function that prints the flow's result.
    """
    parser = _Parser(
        prog=f"python -m {flow.partition(':')[0]}",
        description=(description or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with config fields")
    parser.add_argument("--fields", action="store_true", help="list the config fields and exit")
    parser.add_argument(
        "overrides", nargs="*", metavar="field=value", help="config fields that override those of the config file"
    )
    arguments = parser.parse_args(argv)
    if arguments.fields:
        print_fields(config)
    else:
        exit_on_error(lambda: start(flow, config, arguments.config, arguments.overrides, show))
    gc.freeze()  # the collection at exit would scan half a million objects, for a second
    sys.exit()


def print_fields(config: str) -> None:
    """List the fields of a config class, which is named by its import path."""
    from flows.config.loader import describe_fields

    print("\n".join(describe_fields(cast("type[Config]", import_path(config)))))


def start(flow: str, config: str, file: Path | None, overrides: Sequence[str], show: str = SHOW_RESULT) -> None:
    """Load a config, run a flow and print its result; local servers that the run needs start during its imports.

    Args:
        flow, config, show: Import paths of the flow, of the class of its config and of the function that prints.

    Raises:
        ConfigError: The config is invalid.
    """
    with _prefect_server() as server:
        with no_collections():
            from flows.config.loader import load_config
            from flows.config.references import check_references

            loaded = load_config(cast("type[Config]", import_path(config)), file, overrides)
            check_references(loaded)
        with _explained_interrupts(loaded), _engine(loaded):
            with no_collections():
                function = cast("Flow[..., Any]", import_path(flow))
                show_result = cast("Callable[[Any], None]", import_path(show))
            show_result(_run_quietly(function, loaded, server))


def exit_on_error(action: Callable[[], None]) -> None:
    """Run an action; exit with a one-sentence message and status 1 after a known error, with 130 after Ctrl-C."""
    from prefect.exceptions import CancelledRun

    try:
        action()
    except (TinkerFlowsError, ObjectiveError) as error:
        if traceback_is_requested():
            print_notice(traceback.format_exc())
        sys.exit(escape_terminal(f"error: {error}"))
    except ExplainedInterrupt:
        sys.exit(130)
    except (KeyboardInterrupt, CancelledRun):
        print_notice("Stopped.")
        sys.exit(130)


def run(flow: Flow[..., R], config: Config) -> R:
    """Run a flow against the configured Prefect server, or against a local one for the duration of the run."""
    with _prefect_server() as server:
        return _run_quietly(flow, config, server)


@contextmanager
def _prefect_server() -> Iterator[PrefectServer | None]:
    """Start a Prefect server for a run; yield None if Prefect's settings or `tinker-flows up` provide a server."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        check_prefect_url()
        yield None
    elif server := running_prefect_server():
        print_notice(f"Using the Prefect server of `tinker-flows up` at {server.url}")
        with temporary_settings({PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: server.login}):
            yield None
    else:
        with starting_prefect_server() as server:
            yield server


def _engine(config: Config) -> AbstractContextManager[None]:
    """Start the engine of a run, if it needs one; a flow of several runs, such as rlhf, starts one with each run."""
    from flows.config.base import RunConfig
    from flows.runs.blocks import engine_ahead

    return engine_ahead(config) if isinstance(config, RunConfig) else nullcontext()


def _run_quietly(flow: Flow[..., R], config: Config, server: PrefectServer | None) -> R:
    silence_console_logs()
    with _explained_interrupts(config):
        _check_resumption(config)
        return _run(flow, config, server)


def _check_resumption(config: Config) -> None:
    """Before the run waits for its servers, check that it may continue, and say so if it starts over.

    Raises:
        ConfigError: The config of the run differs or is damaged.
        StorageError: Another process on this machine is writing the run.
    """
    from blocks.files.local_directory import LocalDirectory
    from blocks.files.lock_holder import locked_error
    from blocks.storage import CONFIG
    from flows.config.base import RunConfig
    from flows.runs.blocks import storage_of
    from flows.runs.start.config_record import check_unchanged
    from flows.runs.start.cookbook_compat import has_cookbook_config
    from tasks.training.checkpoints import resumable

    if isinstance(config, RunConfig) and config.if_exists == "resume":
        directory = storage_of(config).run_directory(config.run_name)
        # On S3, the lease of a killed writer looks alive for a while, so the run itself decides when to take it over.
        if isinstance(directory, LocalDirectory) and (holder := directory.writer()):
            raise locked_error(directory.location, holder)
        records = resumable(directory)
        if records and config.resume != "never" and not has_cookbook_config(directory):
            check_unchanged(directory, config, records[0])
        elif not records and directory.read_bytes(CONFIG) is not None:
            print_notice(f"{config.run_name} has no checkpoint: it starts over.")


@contextmanager
def _explained_interrupts(config: Config) -> Iterator[None]:
    """After Ctrl-C or a cancel, say what happens if the command is repeated, and raise ExplainedInterrupt."""
    from prefect.exceptions import CancelledRun

    try:
        yield
    except ExplainedInterrupt:
        raise
    except (KeyboardInterrupt, CancelledRun) as interrupt:
        try:
            how = _how_to_continue(config)
        except (ImportError, AttributeError):  # the interrupt has left a module half imported
            how = "The run had not started: the same command starts it."
        print_notice(f"Stopped. {how}")
        raise ExplainedInterrupt from interrupt


def _how_to_continue(config: Config) -> str:
    """Return a sentence that says what happens if the user repeats the command after a stop.

    With `if_exists: delete`, repeating it deletes the run. Evaluations, comparisons and exports start over.
    """
    from flows.config.base import RunConfig, WeightsConfig
    from flows.runs.blocks import storage_of
    from tasks.reports.summary import storage_option
    from tasks.training.checkpoints import resumable, step_of

    if isinstance(config, WeightsConfig):
        return "Nothing was saved to continue from: the same command starts over."
    if not isinstance(config, RunConfig):
        return "The same command continues."
    try:
        directory = storage_of(config).run_directory(config.run_name)
        records = resumable(directory)
    except TinkerFlowsError:
        storage = f" --storage {shlex.quote(config.storage)}" if config.storage else ""
        resume = f"tinker-flows resume {shlex.quote(config.run_name)}{storage}"
        return f"`{resume}` resumes from the last checkpoint, if there is one."
    if not records:
        same = "asks what to do with the run" if config.if_exists == "ask" else "starts over"
        return f"{config.run_name} has no checkpoint yet: the same command {same}."
    resume = f"tinker-flows resume {shlex.quote(config.run_name)}{storage_option(config.run_name, directory.location)}"
    step = step_of(records[0])
    resumed = f"`{resume}` resumes after {step} step{'s' if step != 1 else ''}"
    if config.if_exists == "delete":
        return f"{resumed}; the same command would delete the run, because if_exists is 'delete'."
    if config.if_exists == "ask":
        return f"{resumed}; the same command asks what to do with the run, because if_exists is 'ask'."
    if config.resume == "never":
        return f"{resumed}; the same command would fail, because the name is in use and resume is 'never'."
    return f"{resumed}, as the same command does."


def _run(flow: Flow[..., R], config: Config, server: PrefectServer | None) -> R:
    """Run a flow on the given Prefect server, or on that of Prefect's settings; raise the error of a failed flow."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows.monitoring.drain import wait_until_recorded

    again = "run the same command again to resume from the last checkpoint"
    if server is None:
        return _run_and_deliver_events(flow, config, f"set PREFECT_API_URL to a running server and {again}").result()
    # Not Prefect's ephemeral server, which silently loses most task runs of a real run.
    server.wait()
    with temporary_settings({PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: server.login}):
        remedy = f"check its log {server.log} and the free space of that disk, and {again}"
        state = _run_and_deliver_events(flow, config, remedy)
        assert state.state_details.flow_run_id is not None
        wait_until_recorded(state.state_details.flow_run_id, "report" if state.is_completed() else None)
        return state.result()


def _run_and_deliver_events(flow: Flow[..., R], config: Config, remedy: str) -> State[R]:
    """Run a flow and deliver its events, also after Ctrl-C, while its server is up.

    Args:
        remedy: how to fix a Prefect server that is not usable.

    Raises:
        ConfigError: Code inside the flow called `sys.exit`, whose status could be that of success.
        ServiceError: The Prefect server is not usable.
    """
    from flows.monitoring.drain import deliver_events
    from flows.monitoring.events import heartbeats

    try:
        with heartbeats(), prefect_failures(remedy):  # the flow's own errors are in its state
            return cast("State[R]", flow(config, return_state=True))
    except SystemExit as error:
        raise ConfigError(
            f"Code that the config names called {exit_call(error)}, which ended the run: raise an error there instead."
        ) from error
    finally:
        deliver_events()


def silence_console_logs() -> None:
    """Limit the terminal to the progress bar and final messages; the Prefect UI has all logs and tracebacks."""
    from prefect.logging.handlers import PrefectConsoleHandler

    from tasks.common.internals.prefect import resend_log_lines

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.CRITICAL)
    resend_log_lines()
    # Prefect's logger of background threads ignores its level. `deliver_events` says what was not sent.
    for handler in logging.getLogger("prefect._internal").handlers:
        if type(handler).__module__ == "prefect.logging.handlers":
            handler.setLevel(logging.CRITICAL)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # It warns if the run continues in another process, which the run itself reports.
    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
    # It logs the SQL statement of each error of the database, which it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # MLflow's client retries requests for minutes, and urllib3 logs each retry. The run itself reports that the store
    # does not respond.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    # Deprecations within tinker-cookbook concern its authors.
    warnings.filterwarnings("ignore", category=FutureWarning, module="tinker_cookbook")

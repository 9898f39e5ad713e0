"""Command line `tinker-flows`: start, inspect, evaluate and export runs, and manage the servers they use.

Each command imports its dependencies only when it is called, so that `--help` responds immediately.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blocks.errors import TinkerFlowsError, traceback_is_requested
from blocks.terminal import escape_terminal, print_notice
from deployments.cli import plans, runs, servers, weights


class _CommandGroup(TyperGroup):
    """Command group that exits with one sentence and status 1 on an error the user can fix, and with 130 on Ctrl-C."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except TinkerFlowsError as error:
            if traceback_is_requested():
                print_notice(traceback.format_exc())
            sys.exit(escape_terminal(f"error: {error}"))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # raised again
            return _exit(error)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of registration, not alphabetical


def _exit(error: BaseException) -> None:
    """Exit on an error of a run or an objective as the command line of a flow does; raise any other error again."""
    modules = {"flows.runs.cli", "objectives.errors"}  # without these, the error is neither
    if not modules & sys.modules.keys():
        raise error
    from flows.runs.cli import exit_on_error

    def reraise() -> None:
        raise error

    exit_on_error(reraise)


app = typer.Typer(
    name="tinker-flows",
    cls=_CommandGroup,
    help="Post-train language models on the Tinker API with Prefect flows: start and resume runs, follow their status, "
    "evaluate and export their weights, and manage the servers they use.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"tinker-flows {version('tinker-flows')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


for _group in (servers, runs, plans, weights):
    _group.add_to(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit with 1 on an error the user can fix, and with 2 on an unknown command or option."""
    # Unlike `python -m`, an installed command cannot import modules of the current folder, which configs may name.
    if not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.append(str(Path.cwd()))
    try:
        app(args=argv, prog_name="tinker-flows")
    finally:
        gc.freeze()  # the collection at exit would scan half a million objects of a run, for a second


if __name__ == "__main__":
    main()

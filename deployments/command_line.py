"""The command `tinker-flows`: runs, what they will take and have become, and the servers around them.

Every command imports what it needs when it is called, so that the help is there at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from blocks.errors import TinkerFlowsError
from deployments.cli import comparisons, plans, runs, servers, weights


class _Commands(TyperGroup):
    """What the user can mend ends a command with a sentence and status 1, a stop with 130."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except TinkerFlowsError as error:
            sys.exit(f"error: {error}")
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # raised again
            return _end(error)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # as they were added: in the order in which one needs them


def _end(error: BaseException) -> None:
    if "flows.command_line" not in sys.modules:  # so it is nothing that only a run can raise
        raise error
    from flows.command_line import exit_with_a_sentence

    def again() -> None:
        raise error

    exit_with_a_sentence(again)


app = typer.Typer(
    name="tinker-flows",
    cls=_Commands,
    help="Post-training on the Tinker API as Prefect flows: runs, what they will take and have become, and the servers "
    "around them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _group in (servers, runs, plans, comparisons, weights):
    _group.add_to(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command of the terminal; exits 1 for what the user can mend, 2 for a command that there is not."""
    app(args=argv, prog_name="tinker-flows")


if __name__ == "__main__":
    main()

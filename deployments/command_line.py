"""The command `tinker-flows`: what there is, without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flows.command_line import exit_with_a_sentence


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command of the terminal; exits 1 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="tinker-flows", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    regularizers = commands.add_parser("regularizers", help="list the terms that an objective can name")
    regularizers.set_defaults(run=_regularizers)
    exit_with_a_sentence(parser.parse_args(argv).run)


def _regularizers() -> None:
    from deployments.regularizers import show_regularizers

    show_regularizers()


if __name__ == "__main__":
    main()

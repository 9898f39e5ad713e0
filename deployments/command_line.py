"""The command `tinker-flows`: what there is, and what a run will take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flows.command_line import exit_with_a_sentence


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command of the terminal; exits 1 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="tinker-flows", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    regularizers = commands.add_parser("regularizers", help="list the terms that an objective can name")
    regularizers.set_defaults(run=_regularizers)
    estimate = commands.add_parser("estimate", help="say the steps, tokens, cost and time of a run before it runs")
    estimate.add_argument("--config", type=Path, required=True, help="YAML file with the fields of the config")
    estimate.add_argument("--json", action="store_true", help="print JSON")
    estimate.add_argument("overrides", nargs="*", metavar="field=value", help="dotted fields that override the file's")
    estimate.set_defaults(run=_estimate)
    automations = commands.add_parser(
        "automations", help="have the Prefect server see runs that died, and start them again"
    )
    automations.set_defaults(run=_automations)
    arguments = parser.parse_args(argv)
    exit_with_a_sentence(lambda: arguments.run(arguments))


def _regularizers(_: argparse.Namespace) -> None:
    from deployments.regularizers import show_regularizers

    show_regularizers()


def _estimate(arguments: argparse.Namespace) -> None:
    from deployments.estimate import show_estimate

    show_estimate(arguments.config, arguments.overrides, arguments.json)


def _automations(_: argparse.Namespace) -> None:
    from deployments.automations import install_all

    install_all()


if __name__ == "__main__":
    main()

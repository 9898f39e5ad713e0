"""Commands before a run: what an objective can name, and what a run will take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.options import Json, Overrides


def add_to(app: typer.Typer) -> None:
    """Add this file's commands."""
    for command in (estimate, regularizers):
        app.command(rich_help_panel="Plans")(command)


def estimate(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="YAML file with the fields of the config.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say the steps, tokens, passes, cost and time of a run before it runs; nothing is trained.

    Example: `tinker-flows estimate --config examples/sft.yaml num_steps=1000`
    """
    from deployments.estimate import show_estimate

    show_estimate(config, overrides or [], as_json)


def regularizers(as_json: Json = False) -> None:
    """List the terms that an objective can name: kind, parameters, and what each one is."""
    from deployments.regularizers import show_regularizers

    show_regularizers(as_json)

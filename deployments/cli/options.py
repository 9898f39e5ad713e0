"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.methods import METHODS


def _complete_method(incomplete: str) -> list[tuple[str, str]]:
    return [(name, method.description) for name, method in METHODS.items() if name.startswith(incomplete)]


Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        autocompletion=_complete_method,
        help="Training method. "
        + "; ".join(f"`{name}`: {method.description}" for name, method in METHODS.items())
        + ".",
        show_default=False,
    ),
]


def complete_run(incomplete: str) -> list[str]:
    """Names of the runs in the default storage that begin with a text."""
    from blocks.storage import RunStorage

    return [name for name in RunStorage().run_names() if name.startswith(incomplete)]


RunName = Annotated[
    str, typer.Argument(metavar="RUN", autocompletion=complete_run, help="Name of the run.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[field=value]...",
        help="Config fields that override those of the config file, as in learning_rate=1e-3 budget.usd=20.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with config fields.", show_default=False),
]
Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        metavar="WHERE",
        help="Storage of the runs: a directory, s3://bucket/prefix or block:NAME.",
        show_default="runs in the project home",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
BaseUrl = Annotated[
    str,
    typer.Option(
        "--base-url",
        metavar="WHERE",
        help="Tinker service: a URL, block:NAME or local, like the config field base_url.",
        show_default=False,
    ),
]

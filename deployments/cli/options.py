"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.methods import METHODS


def _methods(incomplete: str) -> list[tuple[str, str]]:
    return [(name, method.what) for name, method in METHODS.items() if name.startswith(incomplete)]


Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        autocompletion=_methods,
        help="One of: " + "; ".join(f"`{name}`, {method.what}" for name, method in METHODS.items()) + ".",
        show_default=False,
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[field=value]...",
        help="Dotted fields of the config that override the file's, as learning_rate=1e-4 or budget.usd=20.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with the fields of the config.", show_default=False),
]
Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        metavar="WHERE",
        help="Where runs are kept: a directory, s3://bucket/prefix or block:NAME.",
        show_default="runs in the project's home",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for a script.")]

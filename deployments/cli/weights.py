"""Commands for trained weights: evaluate, compare and export them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from blocks.errors import ConfigError
from deployments.cli.options import ConfigFile, Overrides, Storage

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="`RUN`, `RUN@STEP`, `RUN@best`, `RUN@final`, a `tinker://` path, or `base` for the base model.",
        show_default=False,
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (evaluate, compare, export):
        app.command(rich_help_panel="Weights")(command)


def evaluate(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    config: ConfigFile = None,
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline", metavar="CHECKPOINT", help="Checkpoint to evaluate for comparison.", show_default=False
        ),
    ] = "",
) -> None:
    """Evaluate a checkpoint, optionally against a baseline, and register it as a model if it is good enough.

    Example: `tinker-flows evaluate mine@best --baseline base --config evaluate.yaml`

    `python -m flows.evaluate --help` lists the config fields, including the condition for registering a model.
    """
    from flows.config.loader import load_config
    from flows.evaluate import EvaluateConfig, show_evaluation
    from flows.evaluate import evaluate as evaluate_flow
    from flows.runs.cli import run as run_flow

    options = [*_override("checkpoint", checkpoint), *_override("baseline", baseline)]
    show_evaluation(run_flow(evaluate_flow, load_config(EvaluateConfig, config, [*(overrides or []), *options])))


def compare(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    config: ConfigFile = None,
    against: Annotated[
        str, typer.Option("--against", metavar="CHECKPOINT", help="Checkpoint to compare with.")
    ] = "base",
) -> None:
    """Compare the completions of two checkpoints: KL, perplexity, entropy, diversity and a judge's preference.

    Example: `tinker-flows compare mine@best --config compare.yaml num_samples=8`

    `python -m flows.compare --help` lists the config fields.
    """
    from flows.compare import CompareConfig, show_comparison
    from flows.compare import compare as compare_flow
    from flows.config.loader import load_config
    from flows.runs.cli import run as run_flow

    options = [*_override("checkpoint", checkpoint), *_override("against", against)]
    show_comparison(run_flow(compare_flow, load_config(CompareConfig, config, [*(overrides or []), *options])))


def export(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    merged: Annotated[
        str, typer.Option("--merged", metavar="OUT", help="Write the merged model to OUT/merged.", show_default=False)
    ] = "",
    adapter: Annotated[
        str, typer.Option("--adapter", metavar="OUT", help="Write the adapter to OUT/adapter.", show_default=False)
    ] = "",
    storage: Storage = "",
) -> None:
    """Export a checkpoint in Hugging Face format, as a merged model, as an adapter, or both.

    Example: `tinker-flows export mine@400 --merged exported`

    `python -m flows.export --help` lists the other fields that `field=value` can set.
    """
    from flows.config.loader import load_config
    from flows.export import ExportConfig, show_export
    from flows.export import export as export_flow
    from flows.runs.cli import run as run_flow

    if not (merged or adapter) or (merged and adapter and merged != adapter):
        raise ConfigError(
            "The output folder is missing or ambiguous: use --merged OUT, --adapter OUT, or both with the same OUT."
        )
    form = "both" if merged and adapter else "merged" if merged else "adapter"
    fields = {"checkpoint": checkpoint, "output": merged or adapter, "form": form, "storage": storage}
    options = [override for name, value in fields.items() for override in _override(name, value)]
    show_export(run_flow(export_flow, load_config(ExportConfig, None, [*(overrides or []), *options])))


def _override(name: str, value: str) -> list[str]:
    """Return a `field=value` override, quoted so that YAML reads the value as a string; empty if there is no value."""
    return [f"{name}={json.dumps(value)}"] if value else []

"""Commands on the weights that runs have left: measure them, compare them, take them elsewhere."""

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
        help="`RUN`, `RUN@STEP`, `RUN@best`, `RUN@final`, a `tinker://` path, or `base`, which is the model alone.",
        show_default=False,
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add this file's commands."""
    for command in (evaluate, compare, export):
        app.command(rich_help_panel="Weights")(command)


def evaluate(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    config: ConfigFile = None,
    baseline: Annotated[
        str, typer.Option("--baseline", metavar="CHECKPOINT", help="Measure these too, beside it.", show_default=False)
    ] = "",
) -> None:
    """Measure weights by the evaluators of a config, beside a baseline, and register them where they are good enough.

    Example: `tinker-flows evaluate mine@best --baseline base --config evaluate.yaml`

    `python -m flows.evaluate --help` lists the fields of the config.
    """
    from flows.command_line import run as run_flow
    from flows.config_file import load_config
    from flows.evaluate import EvaluateConfig, show_evaluation
    from flows.evaluate import evaluate as evaluate_flow

    given = [*_field("checkpoint", checkpoint), *_field("baseline", baseline)]
    show_evaluation(run_flow(evaluate_flow, load_config(EvaluateConfig, config, [*(overrides or []), *given])))


def compare(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    config: ConfigFile = None,
    against: Annotated[str, typer.Option("--against", metavar="CHECKPOINT", help="What it is compared with.")] = "base",
) -> None:
    """Ask two policies the same questions: KL, perplexity, entropy, diversity, and which answers a judge prefers.

    Example: `tinker-flows compare mine@best --config compare.yaml num_samples=8`

    `python -m flows.compare --help` lists the fields of the config.
    """
    from flows.command_line import run as run_flow
    from flows.compare import CompareConfig, show_comparison
    from flows.compare import compare as compare_flow
    from flows.config_file import load_config

    given = [*_field("checkpoint", checkpoint), *_field("against", against)]
    show_comparison(run_flow(compare_flow, load_config(CompareConfig, config, [*(overrides or []), *given])))


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
    """Write the weights of a checkpoint as Hugging Face tools read them: merged with the base model, or the adapter.

    Example: `tinker-flows export mine@400 --merged exported`

    `python -m flows.export --help` lists what else can be given as `field=value`.
    """
    from flows.command_line import run as run_flow
    from flows.config_file import load_config
    from flows.export import ExportConfig, show_export
    from flows.export import export as export_flow

    if not (merged or adapter) or (merged and adapter and merged != adapter):
        raise ConfigError(
            "Nothing says where to export to: give --merged OUT, --adapter OUT, or both with the same OUT."
        )
    form = "both" if merged and adapter else "merged" if merged else "adapter"
    fields = {"checkpoint": checkpoint, "output": merged or adapter, "form": form, "storage": storage}
    given = [field for name, value in fields.items() for field in _field(name, value)]
    show_export(run_flow(export_flow, load_config(ExportConfig, None, [*(overrides or []), *given])))


def _field(name: str, value: str) -> list[str]:
    """As an override; quoted, so that it is taken for no number."""
    return [f"{name}={json.dumps(value)}"] if value else []

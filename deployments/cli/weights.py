"""Commands for trained weights: sample from them, talk to them, evaluate, compare and export them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from blocks.errors import ConfigError
from blocks.files.local import check_absent, path_of
from deployments.cli.options import BaseUrl, ConfigFile, Json, Overrides, Storage, complete_run

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        autocompletion=complete_run,
        help="`RUN`, `RUN@STEP`, `RUN@best`, `RUN@final`, a `tinker://` path, or `base` for the base model.",
        show_default=False,
    ),
]
ExportedCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        autocompletion=complete_run,
        help="`RUN`, `RUN@STEP`, `RUN@best`, `RUN@final`, or a `tinker://` path.",
        show_default=False,
    ),
]
Model = Annotated[str, typer.Option("--model", metavar="NAME", help="Base model.", show_default="the model of the run")]
RendererName = Annotated[
    str,
    typer.Option(
        "--renderer",
        metavar="NAME",
        help="Chat format: a renderer of tinker-cookbook.",
        show_default="the renderer of the run's data, or else the model's",
    ),
]
System = Annotated[str, typer.Option("--system", metavar="TEXT", help="System prompt.", show_default=False)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum tokens of an answer.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 takes the most likely token.")
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, help="Sampling seed. The same weights, prompt and seed give the same answer, up to rounding."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (sample, chat, evaluate, compare, export):
        app.command(rich_help_panel="Weights")(command)


def sample(
    checkpoint: Checkpoint,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Prompts.", show_default=False)],
    num_samples: Annotated[int, typer.Option("--num-samples", "-n", min=1, help="Answers to each prompt.")] = 1,
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    model: Model = "",
    renderer: RendererName = "",
    base_url: BaseUrl = "",
    storage: Storage = "",
    as_json: Json = False,
) -> None:
    """Sample answers to prompts from a checkpoint.

    Example: `tinker-flows sample mine@best "What is 12 times 7?" -n 4`
    """
    from deployments.talk import Weights, show_samples
    from tasks.common.sampling import Sampling

    weights = Weights(checkpoint, model, renderer, base_url, storage)
    sampling = Sampling(num_samples, max_tokens, temperature, seed)
    show_samples(weights, prompts, system, sampling, as_json=as_json)


def chat(
    checkpoint: Checkpoint,
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    model: Model = "",
    renderer: RendererName = "",
    base_url: BaseUrl = "",
    storage: Storage = "",
) -> None:
    """Talk to a checkpoint. Each line is a message; Ctrl-D ends the chat.

    Example: `tinker-flows chat mine`
    """
    from deployments.talk import Weights
    from deployments.talk import chat as start_chat
    from tasks.common.sampling import Sampling

    weights = Weights(checkpoint, model, renderer, base_url, storage)
    start_chat(weights, system, Sampling(1, max_tokens, temperature, seed))


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
    steps: Annotated[
        str,
        typer.Option(
            "--steps",
            metavar="10,20|all",
            help="Further checkpoints of the run to evaluate and chart.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Evaluate a checkpoint, optionally against a baseline, and register it as a model if it is good enough.

    Example: `tinker-flows evaluate mine@best --baseline base --config evaluate.yaml`

    `python -m flows.evaluate --fields` lists the config fields, including the condition for registering a model.
    """
    from flows.runs.cli import start

    options = [*(overrides or []), *_override("checkpoint", checkpoint), *_override("baseline", baseline)]
    options += _override("steps", steps)
    show = "flows.evaluate:show_evaluation"
    start("flows.evaluate:evaluate", "flows.evaluate:EvaluateConfig", config, options, show)


def compare(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    config: ConfigFile = None,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="CHECKPOINT",
            help="Checkpoint to compare with; by default that of the config, or the base model.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Compare the completions of two checkpoints: KL, perplexity, entropy, diversity and a judge's preference.

    Example: `tinker-flows compare mine@best --config compare.yaml num_samples=8`

    `python -m flows.compare --fields` lists the config fields.
    """
    from flows.runs.cli import start

    options = [*(overrides or []), *_override("checkpoint", checkpoint), *_override("against", against)]
    show = "flows.compare:show_comparison"
    start("flows.compare:compare", "flows.compare:CompareConfig", config, options, show)


def export(
    checkpoint: ExportedCheckpoint,
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

    `python -m flows.export --fields` lists the other fields that `field=value` can set.
    """
    from flows.runs.cli import start

    if not (merged or adapter) or (merged and adapter and merged != adapter):
        raise ConfigError(
            "The output folder is missing or ambiguous: use --merged OUT, --adapter OUT, or both with the same OUT."
        )
    for output in filter(None, [merged and f"{merged}/merged", adapter and f"{adapter}/adapter"]):
        if path := path_of(output):  # before the servers of an export start
            check_absent(path)
    form = "both" if merged and adapter else "merged" if merged else "adapter"
    fields = {"checkpoint": checkpoint, "output": merged or adapter, "form": form, "storage": storage}
    named = [override for name, value in fields.items() for override in _override(name, value)]
    options = [*(overrides or []), *named]
    start("flows.export:export", "flows.export:ExportConfig", None, options, "flows.export:show_export")


def _override(name: str, value: str) -> list[str]:
    """Return a `field=value` override, quoted so that YAML reads the value as a string; empty if there is no value."""
    return [f"{name}={json.dumps(value)}"] if value else []

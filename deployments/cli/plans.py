"""Commands for planning a run: choose a method and a model, estimate the cost, list regularizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from blocks.errors import ConfigError
from deployments.cli.options import BaseUrl, Json, Overrides


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (which_method, models, estimate, regularizers):
        app.command(rich_help_panel="Plans")(command)


def estimate(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="YAML file with config fields.")],
    overrides: Overrides = None,
    method: Annotated[
        Literal[
            "sft",
            "dpo",
            "rl",
            "rlhf",
            "on_policy_distillation",
            "off_policy_distillation",
            "prompt_distillation",
            "self_distillation",
            "evaluate",
        ],
        typer.Option(
            help="Method of the config. For methods that sample, the estimate is the cost of an earlier run of the "
            "same config, or bounds from max_tokens."
        ),
    ] = "sft",
    as_json: Json = False,
) -> None:
    """Estimate the steps, tokens, cost and time of a run without training.

    Example: `tinker-flows estimate --config examples/sft.yaml num_steps=1000`
    """
    from deployments.estimate import show_estimate

    show_estimate(method, config, overrides or [], as_json)


def which_method(
    demonstrations: Annotated[
        bool | None, typer.Option(help="Examples of the completions you want.", show_default=False)
    ] = None,
    preferences: Annotated[
        bool | None, typer.Option(help="Pairs of completions where you know the better one.", show_default=False)
    ] = None,
    judge: Annotated[
        bool | None, typer.Option(help="A model that decides which of two completions is better.", show_default=False)
    ] = None,
    reward: Annotated[bool | None, typer.Option(help="A program that checks a completion.", show_default=False)] = None,
    teacher: Annotated[
        bool | None, typer.Option(help="A stronger model with the same tokenizer.", show_default=False)
    ] = None,
    long_prompt: Annotated[
        bool | None, typer.Option(help="A long prompt that makes the model do what you want.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend a training method for the data, judge, reward or teacher you have.

    Example: `tinker-flows which-method --demonstrations --reward`

    Without flags, the command asks; with `--json`, it never asks. With any flag, a resource without a flag counts as
    unavailable.
    """
    from deployments.which_method import questions, show_advice

    available = {
        "demonstrations": demonstrations,
        "preferences": preferences,
        "judge": judge,
        "reward": reward,
        "teacher": teacher,
        "long_prompt": long_prompt,
    }
    if not as_json and all(flag is None for flag in available.values()):
        if not sys.stdin.isatty():
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in available)
            raise ConfigError(f"There is no terminal to ask in: say what you have with {flags}.")
        available = {
            resource.name: typer.confirm(f"Do you have {resource.question}?", default=False) for resource in questions()
        }
    show_advice({name: bool(flag) for name, flag in available.items()}, as_json)


def models(base_url: BaseUrl = "", as_json: Json = False) -> None:
    """List the models of a Tinker service: context length, prices, `auto` learning rate and renderer.

    Without `--base-url`, TINKER_BASE_URL or TINKER_API_KEY, the command lists the hosted models with known prices; most
    context lengths are then missing, because only the service knows them.
    """
    from deployments.models import show_models

    show_models(base_url, as_json)


def regularizers(as_json: Json = False) -> None:
    """List the available regularizers with kind, parameters and description."""
    from deployments.regularizers import show_regularizers

    show_regularizers(as_json)

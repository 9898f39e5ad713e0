"""Commands before a run: what an objective can name, and what a run will take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cli.options import Json, Overrides


def add_to(app: typer.Typer) -> None:
    """Add this file's commands."""
    for command in (which_method, models, estimate, regularizers):
        app.command(rich_help_panel="Plans")(command)


def estimate(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="YAML file with the fields of the config.")],
    overrides: Overrides = None,
    method: Annotated[
        Literal["sft", "dpo"],
        typer.Option(help="What others sample, and so what they take, nobody knows before: give them a budget."),
    ] = "sft",
    as_json: Json = False,
) -> None:
    """Say the steps, tokens, passes, cost and time of a run before it runs; nothing is trained.

    Example: `tinker-flows estimate --config examples/sft.yaml num_steps=1000`
    """
    from deployments.estimate import show_estimate

    show_estimate(method, config, overrides or [], as_json)


def which_method(  # noqa: PLR0913 - an option for each thing that one may have
    demonstrations: Annotated[bool | None, typer.Option(help="Answers as you want them.", show_default=False)] = None,
    preferences: Annotated[
        bool | None, typer.Option(help="Pairs of answers of which you know the better one.", show_default=False)
    ] = None,
    judge: Annotated[
        bool | None, typer.Option(help="A model that says which of two answers is better.", show_default=False)
    ] = None,
    reward: Annotated[bool | None, typer.Option(help="A program that checks an answer.", show_default=False)] = None,
    teacher: Annotated[
        bool | None, typer.Option(help="A stronger model of the same tokenizer.", show_default=False)
    ] = None,
    long_prompt: Annotated[
        bool | None, typer.Option(help="A long prompt that makes the model do it.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which method suits what you have, why, and the command; it asks for what no flag says.

    Example: `tinker-flows which-method --demonstrations --reward`

    With any flag, what is not named is taken for absent.
    """
    from deployments.which_method import asked, show_advice

    given = {
        "demonstrations": demonstrations,
        "preferences": preferences,
        "judge": judge,
        "reward": reward,
        "teacher": teacher,
        "long_prompt": long_prompt,
    }
    if not as_json and all(each is None for each in given.values()):
        given = {each.name: typer.confirm(f"Do you have {each.question}?", default=False) for each in asked()}
    show_advice({name: bool(value) for name, value in given.items()}, as_json)


def models(
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="WHERE", help="Tinker service, as in a config.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """List the models of a service: context, prices, the learning rate that `auto` takes, and the chat format.

    Without `--base-url` or TINKER_API_KEY it lists those of the hosted service that the project has prices of; their
    contexts only the service knows.
    """
    from deployments.models import show_models

    show_models(base_url, as_json)


def regularizers(as_json: Json = False) -> None:
    """List the terms that an objective can name: kind, parameters, and what each one is."""
    from deployments.regularizers import show_regularizers

    show_regularizers(as_json)

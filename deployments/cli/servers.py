"""Commands around the servers that runs use: start all of them, look whether they are there, have one watch runs."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.cli.options import Json


def add_to(app: typer.Typer) -> None:
    """Add this file's commands."""
    for command in (up, doctor, automations, recipes):
        app.command(rich_help_panel="Servers")(command)


def up(
    engine_models: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-model",
            metavar="NAME",
            help="A model that the engine serves: tiny, smollm2-135m, a Hugging Face directory or hub name; repeat it "
            "for several.",
            show_default="tiny, and smollm2-135m where its weights are installed",
        ),
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(help="Start an engine; without one, runs use TINKER_BASE_URL and TINKER_API_KEY as they are."),
    ] = True,
) -> None:
    """Start all that runs use on this machine: engine, Prefect, MLflow, the deployments and a worker for them.

    It prints where each is and its log, and what to export in another terminal. Ctrl-C, or the end of this process,
    takes all of it down. What runs leave stays in the project's home, and the next `up` shows it.
    """
    from deployments.up import up as start_all

    start_all(engine_models or None, with_engine=engine)


def doctor(
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="WHERE", help="Tinker service, as in a config.", show_default=False)
    ] = "",
    storage: Annotated[
        str, typer.Option("--storage", metavar="WHERE", help="Run storage, as in a config.", show_default=False)
    ] = "",
    tracking: Annotated[
        str, typer.Option("--tracking", metavar="WHERE", help="MLflow tracking, as in a config.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Check what a run would meet: versions, Tinker service and key, Prefect, MLflow, storage, and say what to do.

    Exits 1 where a run could not start. Without options it looks at what the environment names.
    """
    from deployments.doctor import show_checks

    if not show_checks(base_url, storage, tracking, as_json):
        raise typer.Exit(1)


def automations() -> None:
    """Have the Prefect server of PREFECT_API_URL see runs that died, and start those of tagged deployments again."""
    from deployments.automations import install_all

    install_all()


def recipes(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="As in docs/recipes.md; all by default.")
    ] = None,
) -> None:
    """Offer recipes of examples/ as deployments on the Prefect server of PREFECT_API_URL."""
    from deployments.recipes import RECIPES, deploy_recipes

    for each in deploy_recipes(names or list(RECIPES)):
        print(each)

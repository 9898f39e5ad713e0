"""Commands for the servers that runs use: start them locally, check them, set up a Prefect server."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.cli.options import BaseUrl, Json


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (up, doctor, automations, recipes):
        app.command(rich_help_panel="Servers")(command)


def up(
    engine_models: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-model",
            metavar="NAME",
            help="Model that the engine serves: tiny, smollm2-135m, a model directory, or a name on the Hugging "
            "Face Hub. Repeat the option for several models.",
            show_default="tiny, and smollm2-135m if its weights are installed",
        ),
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(help="Start a local engine. With --no-engine, runs use TINKER_BASE_URL and TINKER_API_KEY."),
    ] = True,
) -> None:
    """Start all local services: engine, Prefect, MLflow, deployments and a worker.

    Prints the URL and log file of each service and the variables to export in another terminal. Ctrl-C stops all
    services. Runs and databases stay in the project home, and the next `up` uses them again.
    """
    from deployments.servers.up import up as start_services

    start_services(engine_models or None, with_engine=engine)


def doctor(
    base_url: BaseUrl = "",
    storage: Annotated[
        str,
        typer.Option(
            "--storage", metavar="WHERE", help="Run storage, like the config field storage.", show_default=False
        ),
    ] = "",
    tracking: Annotated[
        str,
        typer.Option(
            "--tracking", metavar="WHERE", help="MLflow tracking, like the config field tracking.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check everything a run needs: package versions, Tinker service and key, Prefect, MLflow and storage.

    Each failed check says how to fix it. Exits with status 1 if a run could not start. Without options, the command
    checks the services selected by the environment.
    """
    from deployments.doctor import show_checks

    if not show_checks(base_url, storage, tracking, as_json):
        raise typer.Exit(1)


def automations() -> None:
    """Install automations that detect and restart crashed runs, on the Prefect server of PREFECT_API_URL."""
    from deployments.servers.automations import install_all

    install_all()


def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names of recipes, as in docs/recipes.md; default: all recipes."),
    ] = None,
) -> None:
    """Deploy the recipes of examples/ to the Prefect server of PREFECT_API_URL."""
    from deployments.recipes import RECIPES, deploy_recipes

    for deployment in deploy_recipes(names or list(RECIPES)):
        print(deployment)

"""Recipes of examples/ as Prefect deployments; the forms are prefilled with the recipe's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from blocks.errors import ConfigError
from blocks.prefect_errors import prefect_failures
from deployments.methods import METHODS, config_type_of
from deployments.servers.work_pool import POOL
from flows.config.loader import load_config

ROOT = Path(__file__).parents[1]
# Name of each recipe and its method.
RECIPES: Mapping[str, str] = {
    "chat_sl": "sft",
    "fairness": "sft",
    "odds": "sft",
    "knowledge": "sft",
    "simulation": "sft",
    "noisy_student": "sft",
    "constitution": "sft",
    "dpo": "dpo",
    "sure": "dpo",
    "rl": "rl",
    "math_rl": "rl",
    "regularized_math": "rl",
    "multiply": "rl",
    "code_rl": "rl",
    "tool_use_search": "rl",
    "twenty_questions": "rl",
    "guess_number": "rl",
    "text_arena": "rl",
    "shorter": "rl",
    "rl_memory_test": "rl",
    "rlhf": "rlhf",
    "on_policy_distillation": "on_policy_distillation",
    "off_policy_distillation": "off_policy_distillation",
    "self_distillation": "self_distillation",
    "prompt_distillation": "prompt_distillation",
}


def file_of(recipe: str) -> Path:
    """Return the config file of a recipe.

    Raises:
        ConfigError: the recipe is unknown.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"Unknown recipe {recipe!r}: use one or more of {', '.join(RECIPES)}.")
    return ROOT / "examples" / f"{recipe}.yaml"


def deploy_recipes(recipes: Sequence[str]) -> list[str]:
    """Deploy recipes to the Prefect server of PREFECT_API_URL; return the deployment names as `flow/recipe`.

    Raises:
        ConfigError: a recipe is unknown, or the server has no work pool `POOL`.
        ServiceError: the server does not respond or rejects a request.
    """
    files = [file_of(recipe) for recipe in recipes]
    with prefect_failures("set PREFECT_API_URL to a running server"):
        try:
            with get_client(sync_client=True) as client:
                client.read_work_pool(POOL)
        except ObjectNotFound as error:
            raise ConfigError(
                f"The Prefect server has no work pool {POOL!r}: create it with `prefect work-pool create {POOL} "
                "--type process`, or start a local server with `tinker-flows up`."
            ) from error
        return [_deploy(recipe, file) for recipe, file in zip(recipes, files, strict=True)]


def _deploy(recipe: str, file: Path) -> str:
    """Deploy one recipe, with its config as the default of the form; return the deployment name."""
    module, _, name = METHODS[RECIPES[recipe]].flow.partition(":")
    entrypoint = f"{module.replace('.', '/')}.py:{name}"
    flow = cast("Flow[..., Any]", Flow.from_source(source=str(ROOT), entrypoint=entrypoint))
    config = load_config(config_type_of(RECIPES[recipe]), file, [])
    comment = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    flow.deploy(
        name=recipe,
        work_pool_name=POOL,
        parameters={
            # {start} becomes the scheduled start time of the flow run, so each flow run has its own name.
            "config": {**config.model_dump(mode="json", exclude_unset=True), "run_name": f"{recipe}-{{start}}"}
        },
        description="\n".join(line.removeprefix("# ") for line in comment),
        tags=["recipe"],
        print_next_steps=False,
        ignore_warnings=True,
    )
    return f"{flow.name}/{recipe}"

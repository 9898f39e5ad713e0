"""The recipes of examples/ as deployments, whose forms show first what their files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from blocks.errors import ConfigError
from deployments.methods import METHODS, config_type_of
from deployments.pool import POOL
from flows.config_file import load_config

ROOT = Path(__file__).parents[1]
# Each with its method.
RECIPES: Mapping[str, str] = {
    "chat_sl": "sft",
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
    """The file of a recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"There is no recipe {recipe!r}: give some of {', '.join(RECIPES)}.")
    return ROOT / "examples" / f"{recipe}.yaml"


def deploy_recipes(recipes: Sequence[str]) -> list[str]:
    """Offer recipes on the Prefect server that PREFECT_API_URL names, for its work pool; their full names.

    Raises:
        ConfigError: there is no such recipe, or no such pool.
    """
    files = [file_of(each) for each in recipes]
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(POOL)
        except ObjectNotFound as error:
            raise ConfigError(
                f"The Prefect server has no work pool {POOL!r}: `prefect work-pool create {POOL} --type process` makes "
                "it, and so does `tinker-flows up`."
            ) from error
    return [_deploy(recipe, file) for recipe, file in zip(recipes, files, strict=True)]


def _deploy(recipe: str, file: Path) -> str:
    module, _, name = METHODS[RECIPES[recipe]].flow.partition(":")
    entrypoint = f"{module.replace('.', '/')}.py:{name}"
    flow = cast("Flow[..., Any]", Flow.from_source(source=str(ROOT), entrypoint=entrypoint))
    config = load_config(config_type_of(RECIPES[recipe]), file, [])
    comment = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    flow.deploy(
        name=recipe,
        work_pool_name=POOL,
        parameters={
            "config": {**config.model_dump(mode="json", exclude_unset=True), "run_name": f"{recipe}-{{start}}"}
        },
        description="\n".join(line.removeprefix("# ") for line in comment),
        tags=["recipe"],
        print_next_steps=False,
        ignore_warnings=True,
    )
    return f"{flow.name}/{recipe}"

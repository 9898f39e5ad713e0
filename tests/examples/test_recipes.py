"""Recipes: each is in the docs, can be deployed, and runs to its end on the tiny model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from statistics import fmean

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from blocks.errors import ConfigError
from deployments.methods import config_type_of, flow_of
from deployments.recipes import RECIPES, deploy_recipes, file_of
from deployments.servers.work_pool import POOL
from flows.config.loader import load_config

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "recipes.md").read_text()
# Examples that are no recipes.
OTHERS = {"sft", "margins", "sweep", "pareto", "evaluate", "compare"}
# Recipes with a slow test of their own.
TESTED_ELSEWHERE = {"noisy_student", "constitution"} | {recipe for recipe in RECIPES if "distillation" in recipe}
SHORT = {
    "rlhf": [
        "warm_start.num_steps=2",
        "reward.training.num_steps=2",
        "reward.training.promote_if=test/accuracy >= 0",
        "policy.training.num_steps=2",
        "policy.training.eval_every=2",
    ]
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def test_every_example_is_a_recipe_or_listed_as_none() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.yaml")} == RECIPES.keys() | OTHERS


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_in_the_table(recipe: str) -> None:
    assert load_config(config_type_of(RECIPES[recipe]), file_of(recipe), []).run_name
    assert f"`examples/{recipe}.yaml`" in DOCS


def test_recipe_is_deployed_with_its_config(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        (name,) = deploy_recipes(["shorter"])
        deployed = client.read_deployment_by_name(name)
    assert name == "rl/shorter"
    deployed_config = deployed.parameters["config"]
    assert deployed_config["run_name"] == "shorter-{start}"
    recipe_config = load_config(config_type_of("rl"), file_of("shorter"), [])
    assert config_type_of("rl").model_validate(deployed_config | {"run_name": recipe_config.run_name}) == recipe_config
    assert deployed.entrypoint == "flows/rl.py:rl"
    assert deployed.description


def test_an_unknown_recipe_is_rejected() -> None:
    with pytest.raises(ConfigError, match="Unknown recipe 'longer': use one or more of chat_sl, "):
        deploy_recipes(["longer"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in TESTED_ELSEWHERE])
def test_a_recipe_runs_to_its_end(
    recipe: str, store: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.chdir(ROOT)
    tracking = f"sqlite:///{store / 'mlflow.db'}"
    places = [f"base_url={engine_url}", f"storage={store / 'runs'}", f"tracking={tracking}", "model=tiny"]
    short = SHORT.get(recipe, ["num_steps=2", "checkpoint_every=2", "eval_every=2"])
    method = RECIPES[recipe]
    result = flow_of(method)(load_config(config_type_of(method), file_of(recipe), [*places, *short]))
    assert (result.num_steps, result.stopped) == (2, "")
    client = MlflowClient(tracking)
    plays = method in ("rl", "rlhf")
    for key in ("loss/total", *(("env/all/reward/total", "optim/kl_sample_train_v1") if plays else ())):
        assert len(client.get_metric_history(result.mlflow_run_id, key)) == 2, key
    if plays:
        failed = client.get_metric_history(result.mlflow_run_id, "rollout_errors/total")
        assert [point.value for point in failed] == [0.0] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_memory_test_learns(
    store: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of the KL term that is much too high keeps the mean reward at 0.01."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    tracking = f"sqlite:///{store / 'mlflow.db'}"
    changed = [f"base_url={engine_url}", f"storage={store / 'runs'}", f"tracking={tracking}", "num_steps=40"]
    config = load_config(config_type_of("rl"), file_of("rl_memory_test"), [*changed, "run_name=memory"])
    result = flow_of("rl")(config)
    history = MlflowClient(tracking).get_metric_history(result.mlflow_run_id, "env/all/reward/total")
    rewards = [point.value for point in sorted(history, key=lambda point: point.step)]
    assert len(rewards) == 40
    assert fmean(rewards[:5]) < 0.05
    assert fmean(rewards[-10:]) > 0.2, "at least about one digit of four"

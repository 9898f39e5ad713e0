"""Every recipe of the examples, to its end on the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.config_file import load_config, read_yaml
from flows.rl import RlConfig, rl

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if "environment" in read_yaml(path))
DOCS = (ROOT / "docs" / "recipes.md").read_text()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_in_the_table(path: Path) -> None:
    assert load_config(RlConfig, path, []).environment.builder
    assert f"`examples/{path.name}`" in DOCS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_to_its_end(
    path: Path, store: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.chdir(ROOT)
    tracking = f"sqlite:///{store / 'mlflow.db'}"
    places = [f"base_url={engine_url}", f"storage={store / 'runs'}", f"tracking={tracking}", "model=tiny"]
    config = load_config(RlConfig, path, [*places, "num_steps=2", "checkpoint_every=2", "eval_every=2"])
    result = rl(config)
    assert result.num_steps == 2
    client = MlflowClient(tracking)
    for key in ("env/all/reward/total", "loss/total", "optim/kl_sample_train_v1"):
        assert len(client.get_metric_history(result.mlflow_run_id, key)) == 2, key
    failed = client.get_metric_history(result.mlflow_run_id, "rollout_errors/total")
    assert [point.value for point in failed] == [0.0] * 2

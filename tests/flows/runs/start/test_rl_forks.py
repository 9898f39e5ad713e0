"""Forks of `rl` inherit what the data source of their parent has learned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, running_engine
from metric_history import curve
from rl_config import rl_fields

from blocks.storage import RunStorage
from flows.config.rl import RlConfig
from flows.rl import rl
from tasks.training.checkpoints import read_records

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("prefect_server", "api_key")]

REFILL = {"rollout": {"max_tokens": 8, "refill_rounds": 2}, "advantage": {"drop_constant": True}}
CRITIC = {"advantage": {"estimator": "gae", "critic": {"steps": 3}}}
TARGET = {"rewards": {"num_letters": {"target": {"at_least": 4.0}}, "total": {"weight": 0.5}}}


@pytest.fixture(scope="module")
def exact_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engine whose samples do not depend on concurrent requests."""
    with running_engine(tmp_path_factory.mktemp("exact"), arguments=("--deterministic",)) as engine:
        yield engine


@pytest.mark.parametrize("changes", [REFILL, CRITIC, TARGET], ids=["refill", "critic", "target"])
def test_an_unchanged_fork_of_rl_equals_its_parent(
    changes: dict[str, Any], tmp_path: Path, exact_engine: EngineProcess, mlflow_uri: str
) -> None:
    fields = rl_fields(tmp_path, "parent", mlflow_uri, exact_engine.url) | {
        "eval_every": 0,
        "experiment": tmp_path.name,
    }
    parent = rl(RlConfig.model_validate(fields | changes))
    fork = rl(RlConfig.model_validate(fields | changes | {"run_name": "fork", "resume": "parent@2"}))

    for key in ("loss/base", "env/all/reward/total", "optim/entropy"):
        assert curve(fork, key) == curve(parent, key)[2:]
    storage = RunStorage(url=fields["storage"])
    last, last_of_parent = (read_records(storage.run_directory(name)).checkpoints[0] for name in ("fork", "parent"))
    assert last.extra["source"] == last_of_parent.extra["source"]
    assert last.extra["source"]

"""Sweeps over rlhf, whose trials have a run per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from rlhf_config import rlhf_fields

from blocks.errors import ConfigError, ServiceError
from blocks.files.local_directory import LocalDirectory
from flows.config.loader import load_config
from flows.config.rlhf import RlhfConfig
from flows.sweep import sweep
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import make_plan
from flows.sweeps.protocols import measured_config
from flows.sweeps.result import SweepResult
from tasks.sweeps.store import Trial, read_trials

RATE, REWARD_RATE = "policy.training.learning_rate", "reward.training.learning_rate"


def sweep_fields(folder: Path, run_name: str, tracking: str, url: str, **changed: Any) -> dict[str, Any]:
    """Return a sweep in which the second point has the smaller learning rate, and is pruned for it.

    The reward model has a learning rate below both, so that its steps would prune the first point, too.
    """
    base = rlhf_fields(folder, "base", tracking, url) | {"warm_start": {}}
    base["reward"]["training"] |= {"eval_every": 0, "learning_rate": 1e-9}
    base["policy"]["training"] |= {"eval_every": 0, "num_steps": 4, "lr_schedule": "constant"}
    return {
        "run_name": run_name,
        "flow": "rlhf",
        "base": {key: value for key, value in base.items() if key != "run_name"},
        "space": {RATE: [1e-3, 1e-5]},
        "metric": "optim/lr",
        "mode": "max",
        "prune": {"rule": "median", "min_trials": 1},
        "concurrency": 1,
    } | changed


def trials_of(result: SweepResult) -> dict[int, Trial]:
    trials = read_trials(LocalDirectory(Path(result.directory)))
    return {point: trial for (point, _), trial in trials.finished.items()}


def runs_below(result: SweepResult) -> dict[str, Run]:
    below = f"tags.`mlflow.parentRunId` = '{result.mlflow_run_id}'"
    runs = MlflowClient(result.tracking_uri).search_runs([result.experiment_id], below)
    return {str(run.info.run_name): run for run in runs}


@pytest.mark.usefixtures("prefect_server", "api_key")
def test_trials_are_ranked_and_pruned_by_the_policy_stage(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    config = SweepConfig.model_validate(sweep_fields(tmp_path, "staged", mlflow_uri, engine_url))
    result = sweep(config)
    assert (result.num_completed, result.num_pruned, result.num_failed) == (1, 1, 0)
    assert (result.best_point, result.best_value) == (1, pytest.approx(1e-3))
    pruned = trials_of(result)[2]
    assert pruned.reason.startswith("Pruned at step 1 with optim/lr")
    assert [step for step, _ in pruned.curve] == [0, 1]

    runs = runs_below(result)
    statuses = {name: run.info.status for name, run in runs.items()}
    assert statuses == {
        "staged-001-s0-reward": "FINISHED",
        "staged-001-s0-policy": "FINISHED",
        "staged-002-s0-reward": "FINISHED",
        "staged-002-s0-policy": "KILLED",
    }
    assert runs["staged-002-s0-reward"].data.tags["tinker_flows.rlhf"] == "staged-002-s0"
    assert runs["staged-002-s0-policy"].data.tags["tinker_flows.point"] == "2"
    assert pruned.mlflow_run_id == runs["staged-002-s0-policy"].info.run_id
    best = load_config(RlhfConfig, Path(result.best_config), [])
    assert measured_config(best).learning_rate == 1e-3

    again = sweep(config)  # finished and pruned trials are not repeated
    assert runs_below(again).keys() == runs.keys()
    assert trials_of(again) == trials_of(result)


@pytest.mark.usefixtures("prefect_server", "api_key")
def test_a_trial_that_an_earlier_stage_ends_fails_with_its_reason(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    fields = sweep_fields(tmp_path, "gated", mlflow_uri, engine_url, prune=None, space={})
    gate = {"register_as": "gated-reward", "promote_if": "test/accuracy > 1", "num_steps": 1, "eval_every": 1}
    fields["base"]["reward"]["training"] |= gate
    message = "an earlier stage ended the trial: The checkpoint at step 1 is not promoted: test/accuracy is"
    with pytest.raises(ServiceError, match=message):
        sweep(SweepConfig.model_validate(fields))
    assert not (tmp_path / "runs" / "gated-001-s0-policy").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect_server", "api_key")
def test_pruning_stops_a_stage_on_a_worker_of_dask(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    pytest.importorskip("distributed", reason="pip install -c constraints.txt -e '.[dask]'")
    fields = sweep_fields(tmp_path, "sent", mlflow_uri, engine_url, cluster="dask")
    fields["base"]["policy"]["training"] |= {"num_steps": 40, "num_epochs": 10}
    result = sweep(SweepConfig.model_validate(fields))
    assert (result.num_completed, result.num_pruned) == (1, 1)
    assert runs_below(result)["sent-002-s0-policy"].info.status == "KILLED"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ablation": "leave_one_out"}, "rlhf has a run per stage: remove them"),
        ({"space": {"policy.training.learning_rat": [1.0]}}, "policy.training.learning_rat=1.0: .*learning_rat"),
        ({"space": {REWARD_RATE: [-1.0]}}, "reward.training.learning_rate=-1.0"),
        ({"space": {"policy.training.objective": [{"base_loss": "nothing"}]}}, "nothing"),
        ({"fixed": {"policy.training.seed": 0}}, "a stage has the seed 0, so the sweep's seeds do not reach it"),
        ({"space": {"reward.training.seed": [1, 2]}}, "a stage has the seed 1, so the sweep's seeds do not reach it"),
        ({"fixed": {"needs_approval": True}}, "no person can be asked about each trial"),
    ],
)
def test_invalid_sweeps_are_refused_before_the_first_trial(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(SweepConfig.model_validate(sweep_fields(tmp_path, "wrong", "", "http://x", **changed)))


def test_tags_of_a_stage_add_to_those_of_all_stages(tmp_path: Path) -> None:
    fields = rlhf_fields(tmp_path, "tagged", "") | {"mlflow_tags": {"team": "a", "mlflow.parentRunId": "7"}}
    fields["reward"]["training"]["mlflow_tags"] = {"team": "b"}
    stages = RlhfConfig.model_validate(fields).stages()
    common = {"tinker_flows.rlhf": "tagged", "mlflow.parentRunId": "7"}
    assert [stage.mlflow_tags for stage in stages] == [common | {"team": team} for team in ("a", "b", "a")]

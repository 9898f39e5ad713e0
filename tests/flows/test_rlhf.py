"""The rlhf flow on the tiny model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from metric_history import curve
from mlflow import MlflowClient
from mlflow.entities import Run
from rlhf_config import rlhf_fields

from flows.config.plain_data import read_yaml
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.rlhf import rlhf
from flows.sft import sft
from tasks.rl.environments.reward_model import RewardModel

ROOT = Path(__file__).parents[2]
STAGES = ("sft", "reward", "policy")

pytestmark = pytest.mark.usefixtures("api_key")


def stages_of(run_name: str, tracking: str) -> dict[str, Run]:
    """Return the MLflow run of each started stage."""
    client = MlflowClient(tracking)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`tinker_flows.rlhf` = '{run_name}'")
    return {str(run.info.run_name).removeprefix(f"{run_name}-"): run for run in runs}


def num_updates(run: Run, tracking: str) -> int:
    return len(MlflowClient(tracking).get_metric_history(run.info.run_id, "loss/total"))


@pytest.mark.usefixtures("prefect_server")
def test_finished_stages_are_not_repeated(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RlhfConfig.model_validate(rlhf_fields(tmp_path, "human", mlflow_uri, engine_url))
    with monkeypatch.context() as patch:
        patch.setattr(RewardModel, "score", InterruptedInTheFirstStep(num_groups=2))
        with pytest.raises(KeyboardInterrupt):
            rlhf(config)
    interrupted = stages_of("human", mlflow_uri)
    assert [num_updates(interrupted[stage], mlflow_uri) for stage in STAGES] == [2, 2, 1]
    weights = {stage: (tmp_path / "runs" / f"human-{stage}" / "checkpoints.jsonl").read_text() for stage in STAGES[:2]}
    flow_runs = [interrupted[stage].data.tags["prefect.flow_run_id"] for stage in STAGES]

    first = rlhf(config)
    assert (first.run_name, first.resumed_from, first.num_steps) == ("human-policy", 1, 2)
    ended = stages_of("human", mlflow_uri)
    assert [num_updates(ended[stage], mlflow_uri) for stage in STAGES] == [2, 2, 2]
    for stage, before in weights.items():
        assert (tmp_path / "runs" / f"human-{stage}" / "checkpoints.jsonl").read_text() == before
    # Every stage has a new flow run, including finished ones.
    assert all(ended[stage].data.tags["prefect.flow_run_id"] not in flow_runs for stage in STAGES)

    assert ended["reward"].data.metrics.keys() >= {"bradley_terry_loss", "accuracy", "test/accuracy"}
    # The policy starts from the warm start, which is also its reference.
    assert curve(first, "kl_policy_base")[0] == pytest.approx(0, abs=1e-4)
    policy = ended["policy"].data
    assert policy.params["reference"] == policy.params["init_from"] == policy.tags["tinker_flows.parent.state_path"]
    for key in ("env/all/score", "env/all/reward/total", "env/all/format"):
        assert len(curve(first, key)) == 2
    assert "test/env/all/score" in first.metrics


class InterruptedInTheFirstStep:
    """Press Ctrl-C during the evaluation before the first update."""

    def __init__(self, num_groups: int) -> None:
        self._calls_left = num_groups + 1

    async def __call__(self, conversations: Sequence[object]) -> list[float]:
        self._calls_left -= 1
        if self._calls_left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return [-float(index) for index in range(len(conversations))]


@pytest.mark.usefixtures("prefect_server")
def test_the_policy_starts_from_the_best_weights_of_each_stage(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    """The losses fall, so their maximum is at the first checkpoint, and the last weights are not the best."""
    fields = rlhf_fields(tmp_path, "best", mlflow_uri, engine_url)
    for training, metric in ((fields["warm_start"], "train_mean_nll"), (fields["reward"]["training"], "loss/total")):
        training["keep_best"] = {"metric": metric, "mode": "max"}
    result = rlhf(RlhfConfig.model_validate(fields))
    first = {
        stage: json.loads((tmp_path / "runs" / f"best-{stage}" / "checkpoints.jsonl").read_text().splitlines()[0])
        for stage in STAGES[:2]
    }
    config = json.loads((Path(result.directory) / "config.json").read_text())
    assert config["init_from"] == config["reference"] == first["sft"]["state_path"]
    assert config["environment"]["params"]["path"] == first["reward"]["state_path"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("seed", range(3))
def test_policy_improves_near_its_start(tmp_path: Path, engine_url: str, mlflow_uri: str, seed: int) -> None:
    fields = rlhf_fields(tmp_path, f"learned-{seed}", mlflow_uri, engine_url)
    config = RlhfConfig.model_validate(fields | recipe_fields() | {"seed": seed})
    result = rlhf(config)
    ranked = stages_of(config.run_name, mlflow_uri)["reward"].data.metrics["test/accuracy"]
    assert ranked > 0.9
    before, *_, after = curve(result, "test/env/all/score")
    assert after > before + 2
    assert max(curve(result, "kl_policy_base")) < 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("seed", range(3))
def test_pairwise_judge_ranks_held_out_pairs(tmp_path: Path, engine_url: str, mlflow_uri: str, seed: int) -> None:
    training = {"learning_rate": 5e-3, "lr_schedule": "constant", "num_steps": 90, "num_epochs": 6, "eval_every": 90}
    reward = {"kind": "pairwise", "batch_size": 16, "max_length": 512, "training": training}
    fields = rlhf_fields(tmp_path, f"pairwise-{seed}", mlflow_uri, engine_url)
    fields |= {"comparisons": recipe_fields()["comparisons"], "lora_rank": 16, "seed": seed, "reward": reward}
    stage = RlhfConfig.model_validate(fields).reward_stage()
    assert isinstance(stage, SftConfig)
    assert curve(sft(stage), "test/accuracy")[-1] > 0.9


def recipe_fields() -> dict[str, Any]:
    """Return the recipe's fields without model, service and storage."""
    fields = read_yaml(ROOT / "examples" / "rlhf.yaml")
    return {name: value for name, value in fields.items() if name not in ("run_name", "model")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("kind", ["pairwise", "judge"])
def test_pairwise_competition_with_trained_and_given_judges(
    tmp_path: Path, engine_url: str, mlflow_uri: str, kind: str
) -> None:
    fields = rlhf_fields(tmp_path, f"compete-{kind}", mlflow_uri, engine_url) | {"warm_start": {}}
    if kind == "pairwise":
        fields["reward"]["kind"] = kind
    else:
        del fields["reward"]
        fields["judge"] = {
            "builder": "tasks.preference.preference_models:PromptedJudgeBuilder",
            "params": {"model": "tiny"},
        }
    result = rlhf(RlhfConfig.model_validate(fields))
    for key, num_points in (("env/all/win_minus_loss", 2), ("test/env/all/win_rate", 2)):
        assert len(curve(result, key)) == num_points
    first = stages_of(f"compete-{kind}", mlflow_uri)
    assert first.keys() == ({"reward", "policy"} if kind == "pairwise" else {"policy"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"training": {"learning_rate": -1}}}, "learning_rate"),
        ({"policy": {"training": {"rank": 4}}}, "the field .rank. is unknown"),
        ({"warm_start": {"model": "large"}}, "a stage must not set model"),
        ({"policy": {"training": {"environment": {"builder": "a:b"}}}}, "policy.training must not set environment"),
        ({"policy": {"training": {"init_from": "mine"}}}, "policy.training must not set init_from, .*: remove it"),
        ({"reward": {"training": {"batch_size": 4}}}, "reward.training must not set batch_size, .*: set reward.batch"),
        (
            {"reward": {"kind": "pairwise", "training": {"data": {"builder": "a:b"}}}},
            "reward.training must not set data, which follows from the other fields: remove it",
        ),
        ({"judge": {"builder": "a:b"}}, "judge replaces the reward model"),
    ],
)
def test_invalid_stages_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RlhfConfig.model_validate(rlhf_fields(tmp_path, "wrong", "") | changes)


@pytest.mark.parametrize(
    "judge", [None, {"builder": "tasks.preference.preference_models:JudgeBuilder", "params": {"judge": "a:b"}}]
)
def test_config_roundtrip(tmp_path: Path, judge: dict[str, Any] | None) -> None:
    """A Prefect server restarts a flow run from its serialized config."""
    fields = rlhf_fields(tmp_path, "again", "") | {"renderer_name": "qwen3_instruct", "judge": judge}
    if judge:
        del fields["reward"]
    config = RlhfConfig.model_validate(fields)
    assert RlhfConfig.model_validate_json(config.model_dump_json()) == config
    environment = config.policy_stage("", "").environment
    named = {name for name in environment.params if name.endswith("renderer_name")}
    assert named == ({"policy_renderer_name"} if judge else {"renderer_name"})


@pytest.mark.usefixtures("prefect_server")
def test_failed_promotion_gate_ends_the_flow(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = rlhf_fields(tmp_path, "gated", mlflow_uri, engine_url) | {"warm_start": {}}
    fields["reward"]["training"] |= {"register_as": "reward", "promote_if": "test/accuracy > 1"}
    state = rlhf(RlhfConfig.model_validate(fields), return_state=True)
    assert state.name == "NotPromoted"
    assert stages_of("gated", mlflow_uri).keys() == {"reward"}

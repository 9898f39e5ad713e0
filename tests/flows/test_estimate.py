"""Estimates: pace of earlier runs, and hosted models without a key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_store import new_store
from sft_config import sft_fields
from tinker_cookbook.tokenizer_utils import get_tokenizer

from blocks.errors import ConfigError
from deployments.estimate import _rows
from engine.models import resolve_model
from flows.config.train import SftConfig
from flows.estimates.costs import schedule_of
from flows.estimates.supervised import estimate
from flows.runs.blocks import open_service, storage_of
from flows.runs.pace import find_pace
from flows.runs.start.fork import check_end


def test_pace_is_of_the_newest_run_of_the_same_method(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    config = SftConfig.model_validate(sft_fields(tmp_path, "next", uri))
    client = MlflowClient(uri)
    experiment = client.create_experiment(config.experiment)
    runs = [("older", "sft", "tiny", 4.0), ("sft", "sft", "tiny", 2.0), ("rl", "rl", "tiny", 8.0)]
    runs.append(("other-model", "sft", "smollm2-135m", 16.0))
    for start, (name, method, model, seconds) in enumerate(runs, start=1):
        tags = {"prefect.flow_name": method}
        run = client.create_run(experiment, start_time=start, tags=tags, run_name=name).info.run_id
        client.log_param(run, "model", model)
        for step in range(3):
            client.log_metric(run, "num_tokens", 100, step=step)
            evaluation = 90.0 if step == 2 else 0.0
            client.log_metric(run, "time/step", seconds + evaluation, step=step)
            if evaluation:
                client.log_metric(run, "time/evaluation", evaluation, step=step)
    pace = find_pace(client, experiment, config.model, "sft")
    assert pace == ("sft", pytest.approx(100 / 2.0), 90.0)
    assert pace.hours(3600, num_evaluations=2) == pytest.approx(0.02 + 2 * 90 / 3600)
    assert find_pace(client, experiment, config.model, "dpo") is None


@pytest.mark.process
def test_hosted_model_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run names the missing key; the estimate needs none, only the tokenizer of the model."""
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    fields = sft_fields(tmp_path, "hosted", f"sqlite:///{tmp_path / 'mlflow.db'}", "") | {"model": "Qwen/Qwen3-8B"}
    config = SftConfig.model_validate(fields)
    missing = "TINKER_API_KEY is missing, and Qwen/Qwen3-8B is a model of the hosted Tinker service"
    with pytest.raises(ConfigError, match=missing), open_service(config):
        pass
    without_price = config.model_copy(update={"model": "Qwen/Qwen3-8B:peft:131072"})
    missing = "TINKER_API_KEY is missing, and Qwen/Qwen3-8B:peft:131072 is a model of the hosted Tinker service"
    with pytest.raises(ConfigError, match=missing), open_service(without_price):
        pass
    tokenizer = get_tokenizer(str(resolve_model("tiny", tmp_path / "cache")))
    monkeypatch.setattr("flows.estimates.supervised.get_tokenizer", {"Qwen/Qwen3-8B": tokenizer}.__getitem__)
    estimated = estimate(config)
    # All batches of the eight steps are counted, so nothing is extrapolated.
    assert dict(_rows(estimated))["tokens in training batches"] == f"{estimated.num_tokens:,}"
    # Qwen3-8B costs $0.44 per million tokens of training passes.
    assert estimated.usd == pytest.approx(estimated.num_train_tokens * 0.44e-6)
    assert estimated.num_tokens == estimate(config.model_copy(update={"model": "tiny", "base_url": "local"})).num_tokens
    # A fork trains only the steps after its checkpoint.
    with storage_of(config).run_directory("parent") as directory:
        directory.write_bytes("config.json", json.dumps(config.model_dump(mode="json")).encode())
        line = {"name": "3", "batch": 3, "step": 3, "epoch": 0, "state_path": "tinker://a/weights/3"}
        directory.append_line("checkpoints.jsonl", json.dumps(line))
    fork = estimate(config.model_copy(update={"resume": "parent@3"}))
    before = estimate(config.model_copy(update={"num_steps": 3}))
    assert (fork.num_steps, fork.first_step, fork.num_forward_backwards) == (5, 3, 5)
    assert fork.num_tokens == estimated.num_tokens - before.num_tokens
    assert dict(_rows(fork))["steps"] == "5 (from step 3)"
    with pytest.raises(ConfigError, match="at step 3, but this run ends at step 3: raise num_steps, or"):
        estimate(config.model_copy(update={"resume": "parent@3", "num_steps": 3}))
    with pytest.raises(ConfigError, match="ends at step 3: raise num_epochs, or"):
        check_end(config.model_copy(update={"num_steps": None}), 3, 3)


def test_a_fork_is_evaluated_from_its_first_step_on(tmp_path: Path) -> None:
    config = SftConfig.model_validate(sft_fields(tmp_path, "fork", "") | {"eval_every": 2, "num_steps": 8})
    with storage_of(config).run_directory("fork") as directory:
        line = {"name": "fork", "batch": 5, "step": 5, "epoch": 0, "state_path": "tinker://a/weights/5"}
        directory.append_line("checkpoints.jsonl", json.dumps(line | {"parent": {"resume": "other@5"}}))
    schedule = schedule_of(config, 8)
    assert (schedule.steps, schedule.num_often) == (range(5, 8), 2)
    assert [*schedule.evaluations()] == [6, 8]
    assert schedule_of(config.model_copy(update={"if_exists": "delete"}), 8).num_often == 5

"""Forks from weights that cannot be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tinker
from engine_process import API_KEY
from metric_history import curve
from sft_config import sft_fields

from blocks.errors import ConfigError, ServiceError
from flows.config.train import SftConfig
from flows.runs.blocks import storage_of
from flows.runs.run import _resumed_client
from flows.runs.start.fork import starts_of
from flows.sft import sft
from objectives.errors import ObjectiveError


def fork(tmp_path: Path, path: str) -> SftConfig:
    return SftConfig.model_validate(sft_fields(tmp_path, "fork", "") | {"resume": path})


def test_missing_checkpoint_announces_no_other(
    tmp_path: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    trained = service.create_lora_training_client("tiny", rank=1).result()
    config = fork(tmp_path, f"tinker://{trained.model_id}/weights/none")
    with pytest.raises(ServiceError, match="none of the 1 checkpoints that 'fork' can start from"):
        _resumed_client(service, config, starts_of(config, storage_of(config)))
    assert "previous checkpoint" not in capsys.readouterr().err


STATE = {
    "targets": {"length": {"integral": 0.5, "gain_unit": 20.0}},
    "estimators": {"length": "score_function"},
    "on_candidates": ["length"],
    "has_chosen": True,
    "passes": 2,
    "last": {},
}


@pytest.mark.parametrize(
    ("changes", "chooses_again"),
    [
        ({}, False),
        ({"learning_rate": 0.5, "num_steps": 9, "guards": {"spike": "stop"}}, False),
        ({"prompt_logprobs_last_n": "off"}, False),
        ({"objective": {"regularizers": [{"name": "length", "weight": 1.0, "estimator": "minimum_risk_mean"}]}}, True),
        ({"candidates": "off"}, True),
        ({"seed": 7}, True),
    ],
)
def test_another_objective_chooses_again(changes: dict[str, Any], chooses_again: bool, tmp_path: Path) -> None:
    """A fork keeps what its parent learned, and what it chose only for the same terms and data."""
    fields = sft_fields(tmp_path, "parent", "") | {"objective": {"regularizers": [{"name": "length", "weight": 1.0}]}}
    record = {"name": "4", "batch": 4, "epoch": 0, "step": 4, "state_path": "tinker://a/weights/4"}
    record |= {"objective": STATE, "guard": {"losses": [1.0]}, "source": {"seen": 4}}
    config = SftConfig.model_validate(fields)
    with storage_of(config).run_directory("parent") as directory:
        directory.write_bytes(
            "config.json", json.dumps({"format_version": 3} | config.model_dump(mode="json")).encode()
        )
        directory.append_line("checkpoints.jsonl", json.dumps(record))
    config = SftConfig.model_validate(fields | {"run_name": "fork", "resume": "parent@4"} | changes)
    (start,) = starts_of(config, storage_of(config))
    learned = {"targets": {"length": {"integral": 0.5, "gain_unit": None}}, "passes": None}
    assert start.extra["objective"] == (learned if chooses_again else STATE)
    assert ("guard" in start.extra) == (not chooses_again)
    assert start.extra["source"] == {"seen": 4}


def test_a_fork_does_not_repeat_the_initial_weights_of_its_parent(tmp_path: Path) -> None:
    """`init_from` beside `resume` is an error, so its absence is no change of what a run trains."""
    fields = sft_fields(tmp_path, "parent", "")
    record = {"name": "4", "batch": 4, "epoch": 0, "step": 4, "state_path": "tinker://a/weights/4", "objective": STATE}
    parent = SftConfig.model_validate(fields | {"init_from": "other@final"})
    with storage_of(parent).run_directory("parent") as directory:
        directory.write_bytes(
            "config.json", json.dumps(parent.model_dump(mode="json") | {"format_version": 3}).encode()
        )
        directory.append_line("checkpoints.jsonl", json.dumps(record))
    fork = SftConfig.model_validate(fields | {"run_name": "fork", "resume": "parent@4"})
    (start,) = starts_of(fork, storage_of(fork))
    assert start.extra["objective"] == STATE


@pytest.mark.usefixtures("prefect_server", "api_key")
def test_a_new_term_of_a_fork_trains(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """A term that the parent does not have trains on candidates as in a new run; without candidates it is an error."""
    data = {"file_path": "examples/data/sums.jsonl", "test_size": 0}
    data["common_config"] = {"renderer_name": "role_colon", "max_length": 200, "batch_size": 4}
    builder = {"builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder", "params": data}
    length = {"name": "length", "weight": 1.0, "params": {"free": 0, "buffer": 8}}
    repetition = {"name": "repetition", "weight": 1.0, "params": {"n": 1}}
    fields = sft_fields(tmp_path, "parent", mlflow_uri, engine_url) | {"data": builder, "num_steps": 1}
    fields |= {"eval_every": 0, "candidates": {"num": 4, "max_tokens": 10}}
    sft(SftConfig.model_validate(fields | {"objective": {"regularizers": [length]}}))
    fields |= {"resume": "parent@final", "num_steps": 2}
    fields["objective"] = {"regularizers": [length, repetition]}
    result = sft(SftConfig.model_validate(fields | {"run_name": "fork"}))
    # The record of the fork's start names its own flow run, which `resume: never` lets start again.
    origin = json.loads((tmp_path / "runs" / "fork" / "checkpoints.jsonl").read_text().splitlines()[0])
    assert origin["flow_run_id"] == result.flow_run_id
    assert curve(result, "term/repetition/trained_prompts")[-1] > 0
    assert curve(result, "term/repetition/grad_share")[-1] > 0
    with pytest.raises(ObjectiveError, match="The scores of length, repetition cannot train"):
        sft(SftConfig.model_validate(fields | {"run_name": "without", "candidates": "off"}))


def test_sampler_weights_are_rejected(tmp_path: Path) -> None:
    config = fork(tmp_path, "tinker://a:train:0/sampler_weights/final")
    with pytest.raises(ConfigError, match="can only be sampled from: use the path of a checkpoint with optimizer"):
        starts_of(config, storage_of(config))

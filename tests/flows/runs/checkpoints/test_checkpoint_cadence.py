"""Kinds of periodic checkpoints, and their cadence in steps, seconds and trained tokens."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import tinker
from engine_process import API_KEY, EngineProcess
from mlflow import MlflowClient
from saved_weights import saved_weights
from sft_config import sft_fields
from tinker_cookbook.checkpoint_utils import CheckpointManager, load_checkpoints_file

from blocks import RunStorage
from blocks.errors import ConfigError
from flows.config.loader import validate_fields
from flows.config.train import SftConfig
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint
from flows.runs.result import TrainResult
from flows.sft import sft
from flows.training.preflight import pitfalls_of
from flows.training.schedule import CheckpointCadence

NUM_STEPS = 8


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)


@pytest.fixture
def fields(tmp_path: Path, mlflow_uri: str, engine_url: str) -> dict[str, Any]:
    """Return a run of eight steps whose batches differ in length."""
    return sft_fields(tmp_path, "run", mlflow_uri, engine_url) | {"num_steps": NUM_STEPS, "objective": {}}


def train(fields: dict[str, Any], **changes: object) -> TrainResult:
    return sft(SftConfig.model_validate(fields | changes))


def lines(result: TrainResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.directory) / "checkpoints.jsonl").read_text().splitlines()]


def paths_on_service(engine_url: str) -> set[str]:
    rest = tinker.RestClient(base_url=engine_url, api_key=API_KEY)
    return {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints}


@pytest.mark.parametrize(("steps", "tokens"), [*itertools.product([0, 3], [0, 700, 5000])])
def test_due_steps_are_those_of_tinker_cookbook(tmp_path: Path, steps: int, tokens: int) -> None:
    """The run is resumed from its newest checkpoint at random steps, as the cookbook's loop would be."""
    fields = sft_fields(tmp_path, "run", "") | {"checkpoint_every": steps, "checkpoint_every_tokens": tokens}
    config = validate_fields(SftConfig, fields)
    chance = random.Random(steps + tokens)
    sizes = [chance.randrange(100, 900) for _ in range(60)]

    def cookbook() -> CheckpointManager:
        client = cast(Any, None)
        return CheckpointManager(client, client, str(tmp_path), save_every=steps, save_every_tokens=tokens)

    theirs, ours = cookbook(), CheckpointCadence(config, {})
    elapsed, saved = 0, 0
    for step, size in enumerate(sizes, start=1):
        elapsed += size
        ours.num_tokens += size
        expected = theirs.should_save_periodic(step, elapsed_tokens=elapsed)
        assert ours.is_due(step, 0.0) == expected
        if expected:
            saved = elapsed
            theirs.restore_last_saved_tokens(saved)
            ours.count_from_here(0.0)
            if chance.random() < 0.3:
                theirs, ours = cookbook(), CheckpointCadence(config, {"elapsed_tokens": saved})
                theirs.restore_last_saved_tokens(saved)
    assert saved > 0 or (steps, tokens) == (0, 0)


def test_seconds_are_counted_over_restarts(tmp_path: Path) -> None:
    """A run that is killed after 50 minutes, again and again, saves a checkpoint in its second hour."""
    fields = sft_fields(tmp_path, "run", "") | {"checkpoint_every": 0, "checkpoint_every_seconds": 3600}
    config = validate_fields(SftConfig, fields)
    first = CheckpointCadence(config, {})
    assert not first.is_due(9, hours=50 / 60)
    second = CheckpointCadence(config, {})
    assert not second.is_due(10, hours=59 / 60)
    assert second.is_due(11, hours=61 / 60)
    second.count_from_here(61 / 60)
    resumed = CheckpointCadence(config, {"spent": {"hours": 61 / 60}})
    for cadence in (second, resumed):
        assert not cadence.is_due(20, hours=2.0)
        assert cadence.is_due(21, hours=2.02)


@pytest.mark.usefixtures("prefect_server")
def test_token_cadence_survives_a_resume_bit_for_bit(
    fields: dict[str, Any], mlflow_uri: str, engine: EngineProcess, engine_url: str
) -> None:
    cadence = {"checkpoint_every": 0, "checkpoint_every_tokens": 3500, "checkpoint_kind": "both"}
    whole = train(fields, **cadence)
    points = MlflowClient(mlflow_uri).get_metric_history(whole.mlflow_run_id, "num_tokens")
    expected, since, elapsed = list[tuple[int, int]](), 0, 0
    for point in sorted(points, key=lambda point: point.step):
        since, elapsed = since + int(point.value), elapsed + int(point.value)
        if since >= 3500 or point.step + 1 == NUM_STEPS:
            expected.append((point.step + 1, elapsed))
            since = 0
    assert [(line["step"], line["elapsed_tokens"]) for line in lines(whole)] == expected
    assert 2 < len(expected) < NUM_STEPS
    saved = paths_on_service(engine_url)
    for line in lines(whole):
        assert {line["state_path"], line["sampler_path"]} <= saved
    assert [line["final"] for line in lines(whole)] == [False] * (len(expected) - 1) + [True]
    assert [record.get("step") for record in load_checkpoints_file(whole.directory)] == [step for step, _ in expected]

    records = Path(whole.directory) / "checkpoints.jsonl"
    records.write_text(records.read_text().splitlines(keepends=True)[0])  # as if killed after the first checkpoint
    again = train(fields, **cadence)
    assert again.resumed_from == expected[0][0]
    assert [(line["step"], line["elapsed_tokens"]) for line in lines(again)] == expected
    assert saved_weights(engine.state, again.state_path) == saved_weights(engine.state, whole.state_path)


@pytest.mark.usefixtures("prefect_server")
def test_seconds_save_every_step_of_a_slow_run(fields: dict[str, Any]) -> None:
    every_step = train(fields, checkpoint_every=0, checkpoint_every_seconds=1e-6)
    assert [line["step"] for line in lines(every_step)] == list(range(1, NUM_STEPS + 1))
    rare = train(fields, run_name="rare", checkpoint_every=0, checkpoint_every_seconds=3600)
    assert [line["step"] for line in lines(rare)] == [NUM_STEPS]


@pytest.mark.usefixtures("prefect_server")
def test_both_kinds_are_kept_and_deleted_together(fields: dict[str, Any], engine_url: str) -> None:
    keep = {"keep_last": 1, "keep_best": {"metric": "test/nll"}, "eval_every": 2, "checkpoint_kind": "both"}
    result = train(fields, ttl_seconds=7200, **keep)
    saved = paths_on_service(engine_url)
    records = [line for line in lines(result) if "state_path" in line]
    best = [line for line in lines(result) if "best" in line][-1]["best_step"]
    for record in records:
        is_kept = record["step"] in (best, NUM_STEPS)
        assert [record[path] in saved for path in ("state_path", "sampler_path")] == [is_kept, is_kept]


@pytest.mark.usefixtures("prefect_server")
def test_sampler_checkpoints_can_be_used_but_not_resumed(
    fields: dict[str, Any], tmp_path: Path, engine: EngineProcess, engine_url: str
) -> None:
    whole = train(fields, checkpoint_kind="sampler", keep_last=2)
    records = [line for line in lines(whole) if "batch" in line]
    assert [line["step"] for line in records] == [2, 4, 6, 8]
    assert ["state_path" in line for line in records] == [False, False, False, True]
    saved = paths_on_service(engine_url)
    assert [line["sampler_path"] in saved for line in records] == [False, True, True, True]
    storage = RunStorage(url=str(tmp_path / "runs"))
    assert find_checkpoint("run@6", storage).path == records[2]["sampler_path"]
    assert find_checkpoint("run", storage).path == whole.state_path
    with pytest.raises(ConfigError, match="no checkpoint at step 6; it has checkpoints at 8"):
        train(fields, run_name="fork", resume="run@6", num_steps=7)
    initial = train(fields, run_name="initial", init_from="run@6", num_steps=1)
    assert lines(initial)[0]["parent"]["state_path"] == records[2]["sampler_path"]

    path = Path(whole.directory) / "checkpoints.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))  # as if killed after step 4
    again = train(fields, checkpoint_kind="sampler", keep_last=2)
    assert (again.resumed_from, again.mlflow_run_id) == (0, whole.mlflow_run_id)
    assert saved_weights(engine.state, again.state_path) == saved_weights(engine.state, whole.state_path)


@pytest.mark.usefixtures("prefect_server")
def test_run_without_periodic_checkpoints_saves_the_final_one(fields: dict[str, Any]) -> None:
    result = train(fields, checkpoint_every=0, num_steps=2)
    assert [(line["step"], line["final"]) for line in lines(result)] == [(2, True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_every": 0}, "keep_best chooses among periodic checkpoints, but checkpoint_every is 0"),
        ({"checkpoint_kind": "sampler"}, "checkpoint_kind is 'sampler': set it to 'both'"),
    ],
)
def test_keep_best_needs_periodic_states(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = sft_fields(tmp_path, "run", "") | {"keep_best": {"metric": "test/nll"}}
    with pytest.raises(ConfigError, match=message):
        validate_fields(SftConfig, fields | changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"checkpoint_every": 0}, "no_checkpoints"),
        ({"checkpoint_kind": "sampler"}, "no_state"),
        ({"checkpoint_every_tokens": 5, "keep_best": {"metric": "test/nll"}}, "keep_best"),
        ({"checkpoint_every": 5, "keep_best": {"metric": "test/nll"}}, "keep_best"),
    ],
)
def test_runs_that_cannot_resume_are_announced(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    fields = sft_fields(tmp_path, "run", "") | {"learning_rate": "auto"}
    assert key not in [pitfall.key for pitfall in pitfalls_of(validate_fields(SftConfig, fields))]
    assert key in [pitfall.key for pitfall in pitfalls_of(validate_fields(SftConfig, fields | changes))]

"""Recorded config of a run whose name is in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sft_config import sft_fields
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import ConfigError
from blocks.files.local_directory import LocalDirectory
from flows.config.train import SftConfig
from flows.runs.start.config_record import check_config


def test_a_run_of_another_method_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"run_name": "pairs", "model": "tiny", "comparisons": {"builder": "x:Y"}})
    )
    config = SftConfig.model_validate(sft_fields(tmp_path, "pairs", ""))
    last = CheckpointRecord(name="5", batch=5, epoch=0, state_path="tinker://a:train:0/weights/5")
    with pytest.raises(ConfigError, match=r"'pairs', .*/config.json, is that of another method \("):
        check_config(LocalDirectory(path), config, last, ())


def test_a_longer_run_is_a_fork(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.mkdir()
    config = SftConfig.model_validate(sft_fields(tmp_path, "short", "") | {"num_steps": 4})
    (path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    last = CheckpointRecord(name="4", batch=4, epoch=0, final=True, state_path="tinker://a:train:0/weights/4")
    changed = [config.model_copy(update={"num_steps": number}) for number in (8, 2)]
    with pytest.raises(ConfigError, match="fork the run with run_name=NEW resume=short@final"):
        check_config(LocalDirectory(path), changed[0], last, ())
    unfinished = CheckpointRecord(name="3", batch=3, epoch=0, state_path="tinker://a:train:0/weights/3")
    for now, newest in ((changed[1], last), (changed[0], unfinished)):
        with pytest.raises(ConfigError, match="choose another run_name, or start anew"):
            check_config(LocalDirectory(path), now, newest, ())


def test_a_longer_stage_is_a_fork_by_its_own_flow(tmp_path: Path) -> None:
    """The flow rlhf has no fields for a fork or a deletion."""
    path = tmp_path / "ref-policy"
    path.mkdir()
    fields = {"num_steps": 4, "mlflow_tags": {"tinker_flows.rlhf": "ref"}, "init_from": "tinker://a/weights/4"}
    config = SftConfig.model_validate(sft_fields(tmp_path, "ref-policy", "") | fields)
    (path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    last = CheckpointRecord(name="4", batch=4, epoch=0, final=True, state_path="tinker://a:train:0/weights/4")
    expected = (
        r"restore it, choose another run_name, or fork the stage with `tinker-flows run METHOD --config FILE "
        r"run_name=NEW resume=ref-policy@final init_from=base`; the first config is"
    )
    with pytest.raises(ConfigError, match=expected):
        check_config(LocalDirectory(path), config.model_copy(update={"num_steps": 8}), last, ())
    with pytest.raises(ConfigError, match="restore it, or choose another run_name; the first config is"):
        check_config(LocalDirectory(path), config.model_copy(update={"num_steps": 2}), last, ())


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "/data/rows.jsonl",
            r" \(rows.jsonl, now /data/rows.jsonl\): restore it in the directory where the run was st",
        ),
        ("/data/other.jsonl", r" \(rows.jsonl, now /data/other.jsonl\): restore it, choose another run_name"),
    ],
)
def test_a_changed_data_file_is_named(file: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "moved"
    path.mkdir()
    builder = {"builder": "a:B", "params": {"file_path": "rows.jsonl", "test_size": 2}}
    config = SftConfig.model_validate(sft_fields(tmp_path, "moved", "") | {"data": builder})
    (path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    newest = CheckpointRecord(name="4", batch=4, epoch=0, state_path="tinker://a:train:0/weights/4")
    builder["params"] = {"file_path": file, "test_size": 2}
    moved = SftConfig.model_validate(config.model_dump() | {"data": builder})
    with pytest.raises(ConfigError, match=rf"another data\.params\.file_path{expected}"):
        check_config(LocalDirectory(path), moved, newest, ())


@pytest.mark.parametrize(
    ("changes", "is_removed"),
    [({}, False), ({"eval_every": 7}, False), ({"seed": 5}, True), ({"candidates": {"num": 8}}, True)],
)
def test_a_run_that_starts_over_uses_no_samples_of_other_settings(
    changes: dict[str, Any], is_removed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first checkpoint, all fields may change; caches with keys of their own stay."""
    fields = sft_fields(tmp_path, "mine", "")
    with LocalDirectory(tmp_path / "mine") as directory:
        check_config(directory, SftConfig.model_validate(fields), None, ())
        of_steps = ["candidates-000000.json", "guards.jsonl", "oversampled.jsonl"]
        for name in (*of_steps, "features.jsonl"):
            directory.write_bytes(name, b"{}\n")
        config = SftConfig.model_validate(fields | changes)
        check_config(directory, config, None, ())
        assert set(directory.names()) == {"config.json", "features.jsonl", *([] if is_removed else of_steps)}
        recorded = json.loads(directory.read_bytes("config.json") or b"")
    assert recorded["seed"] == config.seed
    assert ("starts over with other settings: removed 3 files" in capsys.readouterr().err) == is_removed


def test_never_also_rejects_the_name_of_a_cookbook_run(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir()
    recorded = json.dumps({"log_path": str(path)})
    (path / "config.json").write_text(recorded)
    config = SftConfig.model_validate(sft_fields(tmp_path, "mine", "") | {"resume": "never"})
    last = CheckpointRecord(name="5", batch=5, epoch=0, state_path="tinker://a:train:0/weights/5")
    with pytest.raises(ConfigError, match="'mine' is in use"):
        check_config(LocalDirectory(path), config, last, ())
    assert (path / "config.json").read_text() == recorded

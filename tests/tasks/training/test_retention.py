"""Retention of checkpoints on the service."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import tinker

from blocks import RunStorage
from tasks.training.checkpoints import append_record, read_records
from tasks.training.retention import KeepPolicy, count_candidates, keep_checkpoints


class RecordingRest:
    """REST client that records the deleted checkpoints and the changes of lifetimes; some checkpoints have expired."""

    def __init__(self, *expired: str) -> None:
        self.deleted: list[str] = []
        self.lifetimes: dict[str, int | None] = {}
        self._expired = expired

    def set_checkpoint_ttl_from_tinker_path(self, path: str, ttl_seconds: int | None) -> SimpleNamespace:
        if path in self._expired:
            response = httpx.Response(404, request=httpx.Request("PUT", "http://service"))
            raise tinker.NotFoundError("it has expired", response=response, body=None)
        self.lifetimes[path] = ttl_seconds
        return SimpleNamespace(result=lambda: None)

    def delete_checkpoint_from_tinker_path(self, path: str) -> SimpleNamespace:
        self.deleted.append(path)
        return SimpleNamespace(result=lambda: None)


def test_final_checkpoint_is_kept_even_if_newer_ones_exist(tmp_path: Path) -> None:
    """A run that is extended after its end has a final checkpoint that is not its newest."""
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    rest = RecordingRest()
    with directory:
        for step, final in ((2, False), (4, True), (6, False), (8, False)):
            record = {
                "name": f"{step:06d}",
                "batch": step,
                "epoch": 0,
                "final": final,
                "state_path": f"tinker://{step}",
            }
            append_record(directory, {**record, "step": step})
        policy = KeepPolicy(last=1, metric="", mode="min", ttl_seconds=None)
        keep_checkpoints.fn(cast(Any, rest), directory, cast(Any, None), policy)
        records = read_records(directory)
    assert sorted(rest.deleted) == ["tinker://2", "tinker://6"]
    assert [record.state_path for record in records.checkpoints] == ["tinker://8", "tinker://4"]
    lines = (tmp_path / "run" / "checkpoints.jsonl").read_text().splitlines()
    assert {line["dropped"] for line in map(json.loads, lines) if "dropped" in line} == set(rest.deleted)


def test_an_expired_checkpoint_is_not_the_best_and_the_next_one_is(tmp_path: Path) -> None:
    """A finished run that starts again has no later checkpoint at which it could choose again."""
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    rest, log = RecordingRest("tinker://4"), SimpleNamespace(values=lambda _: {2: 0.3, 4: 0.1, 6: 0.2, 8: 0.4})
    with directory:
        for step in (2, 4, 6, 8):
            record = {"name": f"{step:06d}", "batch": step, "epoch": 0, "step": step, "state_path": f"tinker://{step}"}
            append_record(directory, record)
        append_record(directory, {"name": "best", "best": "tinker://2", "best_step": 2})
        policy = KeepPolicy(last=None, metric="test/nll", mode="min", ttl_seconds=60)
        for _ in range(2):
            best = keep_checkpoints.fn(cast(Any, rest), directory, cast(Any, log), policy)
            assert best
            assert best.state_path == "tinker://6"
        records = read_records(directory)
    assert (records.best["best"], records.dropped) == ("tinker://6", {"tinker://4"})
    assert rest.lifetimes == {"tinker://6": None, "tinker://2": 60}


def test_the_final_checkpoint_never_expires_even_if_it_was_the_best(tmp_path: Path) -> None:
    """A finished run that starts again with another `keep_best` has another best checkpoint."""
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    rest, log = RecordingRest(), SimpleNamespace(values=lambda _: {2: 0.2, 4: 0.1})
    with directory:
        for step, final in ((2, False), (4, True)):
            record = {"name": f"{step:06d}", "batch": step, "epoch": 0, "step": step, "state_path": f"tinker://{step}"}
            append_record(directory, record | {"final": final})
        for mode in ("min", "max"):
            policy = KeepPolicy(last=None, metric="test/nll", mode=mode, ttl_seconds=60)
            keep_checkpoints.fn(cast(Any, rest), directory, cast(Any, log), policy)
        assert read_records(directory).best["best"] == "tinker://2"
    assert rest.lifetimes == {"tinker://2": None, "tinker://4": None}


def test_the_best_checkpoint_does_not_expire_after_an_earlier_ttl(tmp_path: Path) -> None:
    """An earlier start has saved all checkpoints with `ttl_seconds`, and has recorded one under a wrong lifetime."""
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    rest, log = RecordingRest(), SimpleNamespace(values=lambda _: {2: 0.2, 4: 0.1})
    policy = KeepPolicy(last=None, metric="test/nll", mode="min", ttl_seconds=None)
    with directory:
        for step in (2, 4):
            record = {"name": f"{step:06d}", "batch": step, "epoch": 0, "step": step, "state_path": f"tinker://{step}"}
            append_record(directory, record | {"ttl_seconds": 60})
        append_record(directory, {"name": "best", "best": "tinker://2", "best_step": 2})
        keep_checkpoints.fn(cast(Any, rest), directory, cast(Any, log), policy)
        assert rest.lifetimes == {"tinker://4": None}
        rest.lifetimes.clear()
        keep_checkpoints.fn(cast(Any, rest), directory, cast(Any, log), policy)
        assert rest.lifetimes == {"tinker://4": None}
    lines = (tmp_path / "run" / "checkpoints.jsonl").read_text().splitlines()
    assert sum("tinker://4" in line for line in lines) == len(["saved", "best"])


def test_a_run_that_never_had_a_ttl_changes_no_lifetime(tmp_path: Path) -> None:
    """A compatible service may not have lifetimes at all."""
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    rest, log = RecordingRest("tinker://2"), SimpleNamespace(values=lambda _: {2: 0.2})
    policy = KeepPolicy(last=None, metric="test/nll", mode="min", ttl_seconds=None)
    with directory:
        record = {"name": "000002", "batch": 2, "epoch": 0, "step": 2, "state_path": "tinker://2"}
        append_record(directory, record)
        best = keep_checkpoints.fn(cast(Any, rest), directory, cast(Any, log), policy)
    assert best
    assert rest.lifetimes == {}


def test_compared_checkpoints_include_deleted_ones(tmp_path: Path) -> None:
    """Not counted: the checkpoint of the fork's parent, sampler weights, and steps without a finite value."""
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    values = {0: 0.1, 2: 0.2, 4: 0.3, 5: 0.9, 6: math.nan, 7: 0.4, 8: 0.2}
    with directory:
        for step in (2, 4, 6, 8, 10):
            record = {"name": f"{step:06d}", "batch": step, "epoch": 0, "step": step, "state_path": f"tinker://{step}"}
            append_record(directory, record | ({"parent": {"run_name": "other"}} if step == 2 else {}))
        append_record(directory, {"name": "7", "batch": 7, "epoch": 0, "step": 7, "sampler_path": "tinker://7"})
        append_record(directory, {"name": "000004", "dropped": "tinker://4"})
    assert count_candidates(directory, values) == len([4, 8])


@pytest.mark.parametrize(
    "line",
    [
        '"x"',
        '{"name": "z", "batch": "q", "epoch": 0, "state_path": 5}',
        '{"name": "z", "batch": 9, "epoch": 0, "step": "q", "state_path": "tinker://9"}',
        '{"name": "z", "dropped": ["tinker://2"]}',
        '{"name": "best", "best": "tinker://2", "best_step": "q"}',
        '{"name": "z", "batch": 9, "epoch": 0, "state_path": "tinker://9", "parent": "run"}',
    ],
)
def test_malformed_records_are_skipped(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunStorage(url=str(tmp_path)).run_directory("run")
    with directory:
        append_record(directory, {"name": "000002", "batch": 2, "epoch": 0, "state_path": "tinker://2"})
        directory.append_line("checkpoints.jsonl", line)
    records = read_records(directory)
    assert [record.state_path for record in records.checkpoints] == ["tinker://2"]
    assert not records.best
    assert count_candidates(directory, {2: 0.1, 9: 0.2}) == 1
    assert "Line 2 of" in caplog.text
    assert "is not a complete record" in caplog.text

"""Forks: a new run from a checkpoint of another, by what `resume` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import RunStorage
from blocks.errors import ConfigError
from flows.config import RunConfig
from tasks.checkpoint import Records, read_records, step_of

_SERVICE_PATH = "tinker://"

# What a fork takes along of its parent's record; what was spent, and where it was logged, stays the parent's.
_LEARNED = ("objective", "guard")


def forks(config: RunConfig) -> bool:
    """True where `resume` names a checkpoint to start from."""
    return config.resume not in ("auto", "never")


def starts_of_fork(config: RunConfig, storage: RunStorage) -> list[CheckpointRecord]:
    """The checkpoints that `resume` names, as starts of this run, the first one preferred; none where it names none.

    Raises:
        ConfigError: there is no such run, or it has no such checkpoint.
    """
    if not forks(config):
        return []
    if config.resume.startswith(_SERVICE_PATH):
        parent = {"resume": config.resume, "state_path": config.resume}
        return [_start(config.resume, 0, {}, parent)]
    name, _, at = config.resume.partition("@")
    directory = storage.run_directory(name)
    records = read_records(directory)
    if name == config.run_name or not records.checkpoints:
        said = "is this run itself" if name == config.run_name else f"has no checkpoint in {directory.location}"
        raise ConfigError(
            f"resume is {config.resume!r}, but {name!r} {said}: name another run of the same storage, or give the "
            "tinker:// path of a checkpoint."
        )
    found = find_at(records, at)
    if not found:
        steps = ", ".join(str(step) for step in sorted({step_of(each) for each in records.checkpoints}))
        raise ConfigError(
            f"resume is {config.resume!r}, but the run {name!r} {lack_of(at)}; it has checkpoints at {steps}: "
            "name one of them."
        )
    if not all(each.has("step") for each in found):
        raise ConfigError(
            f"resume is {config.resume!r}, but the record of {name!r} is tinker-cookbook's, whose steps count within "
            f"an epoch: give the tinker:// path of a checkpoint, as {found[0].state_path}."
        )
    return [_start_at(config, name, each) for each in found]


def check_lineage(config: RunConfig, records: Sequence[CheckpointRecord]) -> None:
    """Hold a run that goes on to the checkpoint that it was forked from.

    Args:
        records: its own, newest first.

    Raises:
        ConfigError: `resume` names another checkpoint than the one it started from.
    """
    if not (records and forks(config)):
        return
    parent = records[-1].get("parent", {})
    if parent.get("resume") != config.resume:
        origin = f"started from {parent['resume']}" if parent else "has a start of its own"
        raise ConfigError(
            f"The run {config.run_name!r} {origin} and is at step {step_of(records[0])}, but resume is "
            f"{config.resume!r}: choose another run_name for another fork, or resume: auto to go on with that run."
        )


def find_at(records: Records, at: str) -> list[CheckpointRecord]:
    """The checkpoints of a run that `STEP`, `best` or `final` names, the first one preferred; all for an empty name."""
    if at == "best":
        return [each for each in records.checkpoints if each.state_path == records.best.get("best")]
    if at == "final":
        return [each for each in records.checkpoints if each.final][:1]
    return [each for each in records.checkpoints if not at or step_of(each) == int(at)]


def lack_of(at: str) -> str:
    """What a run is told that has no such checkpoint."""
    if at == "best":
        return "has noted no best checkpoint, which keep_best asks for"
    return "has no final checkpoint yet" if at == "final" else f"has no checkpoint at step {at}"


def _start_at(config: RunConfig, name: str, record: CheckpointRecord) -> CheckpointRecord:
    step, path = step_of(record), record.state_path or ""
    parent = {
        "resume": config.resume,
        "run_name": name,
        "step": step,
        "state_path": path,
        "mlflow_run_id": record.get("mlflow_run_id", ""),
    }
    learned = {key: record.extra[key] for key in _LEARNED if record.has(key)}
    return _start(path, step, learned, parent)


def _start(path: str, step: int, learned: dict[str, Any], parent: dict[str, Any]) -> CheckpointRecord:
    extra = {"step": step, **learned, "parent": parent}
    return CheckpointRecord(name="fork", batch=step, epoch=0, state_path=path, extra=extra)

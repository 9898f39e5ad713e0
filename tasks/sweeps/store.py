"""Record of a sweep's trials: trials.jsonl has one line per point and one per finished trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from blocks.storage import RunDirectory
from tasks.common.jsonl import read_jsonl

TRIALS_NAME = "trials.jsonl"

Status = Literal["completed", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class Point:
    """Point of the search space; its trials differ only in their seed.

    Attributes:
        number: position in the order of the search, from 1.
        values: values of the dimensions, by dotted path or name.
    """

    number: int
    values: Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Trial:
    """Finished run of a point with one seed.

    Attributes:
        point: number of the point.
        seed: seed of the run.
        run_name: name of the run.
        status: a `pruned` trial was stopped early because others were better.
        reason: for a failed or pruned trial, the cause; for a completed trial, why its run stopped before its last step
            or was not promoted; otherwise empty.
        seconds: duration of the last attempt.
        value: last value of the sweep's metric; None if the trial failed.
        curve: steps and values of the sweep's metric.
        metrics: last value of every metric.
        mlflow_run_id: ID of the MLflow run; empty if the trial ended before it had one.
    """

    point: int
    seed: int
    run_name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    value: float | None = None
    curve: Sequence[tuple[int, float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    mlflow_run_id: str = ""


@dataclass(frozen=True, slots=True)
class Trials:
    """All records of a sweep: its points in order, and the last record of each finished trial, by point and seed."""

    points: tuple[Point, ...]
    finished: Mapping[tuple[int, int], Trial]


_POINT, _TRIAL = TypeAdapter(Point), TypeAdapter(Trial)


def read_trials(directory: RunDirectory) -> Trials:
    """Read trials.jsonl.

    A line that a crash cut off is skipped, so its point is recorded again or its trial runs again.
    """
    points: dict[int, Point] = {}
    finished: dict[tuple[int, int], Trial] = {}
    for record in read_jsonl(directory, TRIALS_NAME, _parse):
        if isinstance(record, Trial):
            finished[record.point, record.seed] = record
        else:
            points[record.number] = record
    return Trials(tuple(points[number] for number in sorted(points)), finished)


def record_point(directory: RunDirectory, point: Point) -> None:
    """Record a point before its first trial starts."""
    directory.append_line(TRIALS_NAME, json.dumps(asdict(point)))


def record_trial(directory: RunDirectory, trial: Trial) -> None:
    """Record a finished trial."""
    directory.append_line(TRIALS_NAME, json.dumps(asdict(trial)))


def _parse(line: dict[str, Any]) -> Point | Trial:
    return (_TRIAL if "status" in line else _POINT).validate_python(line)

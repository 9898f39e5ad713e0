"""The trials of a sweep, as its directory keeps them: trials.jsonl, a line for each point and each trial's end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from blocks.storage import RunDirectory

TRIALS_NAME = "trials.jsonl"

Status = Literal["completed", "pruned", "failed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A place of the space; its trials differ in nothing but their seed.

    Attributes:
        number: its place in the order of the search, from 1.
        values: what the sweep varies, by its dotted path or name.
    """

    number: int
    values: Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Trial:
    """How a run of a point with one seed ended.

    Attributes:
        point, seed, run_name: which one.
        status: `pruned` is one that was stopped because others were better.
        reason: why it did not complete; one sentence.
        seconds: how long its last attempt took.
        value: the last value of the sweep's metric; None where it failed.
        curve: that metric by step.
        metrics: the last value of every metric.
        mlflow_run_id: its MLflow run; empty where it came to none.
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
    """All that a sweep knows: its points in order, and the last end of each trial, by point and seed."""

    points: tuple[Point, ...]
    ended: Mapping[tuple[int, int], Trial]


_POINT, _TRIAL = TypeAdapter(Point), TypeAdapter(Trial)


def read_trials(directory: RunDirectory) -> Trials:
    """What is recorded so far; a torn line was never acted on."""
    points: dict[int, Point] = {}
    ended: dict[tuple[int, int], Trial] = {}
    for line in _lines(directory):
        if "status" in line:
            trial = _TRIAL.validate_python(line)
            ended[trial.point, trial.seed] = trial
        else:
            point = _POINT.validate_python(line)
            points[point.number] = point
    return Trials(tuple(points[number] for number in sorted(points)), ended)


def record_point(directory: RunDirectory, point: Point) -> None:
    """Keep a point before any trial of it begins."""
    directory.append_line(TRIALS_NAME, json.dumps(asdict(point)))


def record_trial(directory: RunDirectory, trial: Trial) -> None:
    """Keep how a trial ended."""
    directory.append_line(TRIALS_NAME, json.dumps(asdict(trial)))


def _lines(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    content = directory.read_bytes(TRIALS_NAME) or b""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError:
            logger.warning("Line %d of %s/%s is no whole record.", number, directory.location, TRIALS_NAME)

"""What a disturbed run left, held to what the undisturbed one left."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from mlflow import MlflowClient
from saved_weights import saved_weights

from chaos.configs import GROUPS, MAX_STALENESS, storage_of
from chaos.play import Played, run_folder
from chaos.schedule import NUM_STEPS
from chaos.servers import Stage, processes_of

# Where a checkpoint lies, which part of a run made it and what that cost: not what it says of the training.
_MAY_DIFFER = {"state_path", "sampler_path", "mlflow_run_id", "flow_run_id", "flow_run_count", "spent"}

_PLACE = ("name", "batch", "epoch", "final", "step")
_GROUP = re.compile(r"<b>Group \d+ letter_(.)</b>")

Points = Mapping[tuple[str, int], float | None]


@dataclass(frozen=True, slots=True)
class Left:
    """What a run left.

    Attributes:
        weights: every tensor of the final checkpoint, optimizer and all.
        records: the lines of checkpoints.jsonl, less what may differ.
        points: in MLflow, by metric and step; the value of one that measures time or cost is None.
        num_doubled: points at a metric and step that have another one.
        runs: how each MLflow run of that name ended.
        files: the names in the run's directory.
        transcripts: the pages of what was played for each step that was trained on last, in their order.
    """

    weights: Mapping[str, bytes]
    records: tuple[Mapping[str, Any], ...]
    points: Points
    num_doubled: int
    runs: tuple[str, ...]
    files: frozenset[str]
    transcripts: tuple[str, ...]


def look_at(stage: Stage, played: Played) -> Left:
    """Read everything a finished run left, from the services themselves."""
    read, files = _directory(stage, played)
    lines = [json.loads(line) for line in read("checkpoints.jsonl").decode().splitlines()]
    records = tuple({key: value for key, value in line.items() if key not in _MAY_DIFFER} for line in lines)
    (final,) = [line for line in lines if line.get("final")]
    state = stage.folder / "engine" / "state"
    client = MlflowClient(stage.url("mlflow", direct=True))
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, f"attributes.run_name = '{played.name}'")
    points: dict[tuple[str, int], float | None] = {}
    num_points = 0
    for key in runs[0].data.metrics if runs else ():
        for point in client.get_metric_history(runs[0].info.run_id, key):
            is_cost = key.startswith(("time/", "cost/")) or key.endswith("duration_s")
            points[key, point.step] = None if is_cost else point.value
            num_points += 1
    return Left(
        weights=saved_weights(state, final["state_path"]),
        records=records,
        points=points,
        num_doubled=num_points - len(points),
        runs=tuple(run.info.status for run in runs),
        files=files,
        transcripts=tuple(read(name).decode() for name in sorted(files) if name.startswith("transcripts-")),
    )


def differences(kind: str, left: Left, whole: Left) -> Iterator[str]:
    """In what a run differs from the undisturbed one; nothing, if it is what it promises to be."""
    if left.runs != ("FINISHED",):
        yield f"MLflow has {len(left.runs)} runs of its name, which ended as {', '.join(left.runs)}"
    if left.num_doubled:
        yield f"{left.num_doubled} points in MLflow are there twice"
    if left.files != whole.files:
        yield f"its directory has {sorted(left.files ^ whole.files)} too much or too little"
    yield from _off_policy_differences(left, whole) if kind == "async" else _exact_differences(left, whole)


def _exact_differences(left: Left, whole: Left) -> Iterator[str]:
    if left.weights != whole.weights:
        others = [key for key in whole.weights if left.weights.get(key) != whole.weights[key]]
        yield f"{len(others)} of {len(whole.weights)} tensors of the final weights and optimizer differ"
    if left.records != whole.records:
        yield f"checkpoints.jsonl differs: {_first_other(left.records, whole.records)}"
    if left.transcripts != whole.transcripts:
        yield "other answers were sampled"
    if missing := whole.points.keys() - left.points.keys():
        yield f"{len(missing)} points are not in MLflow, as {min(missing)}"
    if more := left.points.keys() - whole.points.keys():
        yield f"{len(more)} points in MLflow are of no step or metric of the run, as {min(more)}"
    if others := [key for key in whole.points if key in left.points and left.points[key] != whole.points[key]]:
        yield f"{len(others)} points in MLflow have another value, as {min(others)}"


def _off_policy_differences(left: Left, whole: Left) -> Iterator[str]:
    """Which groups make up a step is up to the moment: what is promised is their age, and that each is there once."""
    if others := left.weights.keys() ^ whole.weights.keys():
        yield f"{len(others)} tensors of the final weights are missing or too many"
    lines, expected = ([[record.get(key) for key in _PLACE] for record in each.records] for each in (left, whole))
    if lines != expected:
        yield f"checkpoints.jsonl has the steps {lines} where {expected} are expected"
    ages = {step: age for (key, step), age in left.points.items() if key == "async/staleness_max"}
    if ages.keys() != set(range(NUM_STEPS)) or not all(0 <= (age or 0) <= MAX_STALENESS for age in ages.values()):
        yield f"its groups were this old, by step: {ages}"
    groups = Counter(tag for page in left.transcripts for tag in _GROUP.findall(page))
    if groups.total() != GROUPS * NUM_STEPS or len(groups) != groups.total():
        yield f"{groups.total()} groups were trained on, of which {groups.most_common(1)} most often"


def leftovers(stage: Stage, played: Played) -> Iterator[str]:
    """Processes and temporary files of a run that is finished, and how its command and its flow run ended."""
    deadline = time.monotonic() + 5
    while (pids := processes_of(f"{stage.mark}flow:")) and time.monotonic() < deadline:
        time.sleep(0.1)
    if pids:
        yield f"the processes {pids} of it live on"
    for place in (run_folder(stage, played.name) / "tmp", run_folder(stage, played.name) / "home"):
        if files := [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]:
            yield f"{len(files)} files are left in its {place.name}, as {files[0]}"
    if files := [path.name for path in (stage.folder / "engine" / "state").rglob("*") if _is_temporary(path.name)]:
        yield f"the engine has the temporary files {files[:3]}"
    if "Traceback" in (run_folder(stage, played.name) / "output.log").read_text(errors="replace"):
        yield "its command wrote a traceback"
    states = _flow_run_states(stage, played.name)
    if states.count("COMPLETED") != 1:
        yield f"its flow runs in Prefect ended as {', '.join(states)}"


def _directory(stage: Stage, played: Played) -> tuple[Callable[[str], bytes], frozenset[str]]:
    """A reader of the files in a run's directory, and their names."""
    where = storage_of(stage, played.schedule)
    if played.schedule.storage == "local":
        folder = Path(where) / played.name
        return lambda name: (folder / name).read_bytes(), frozenset(path.name for path in folder.iterdir())
    bucket, prefix = stage.bucket(), f"{where.removeprefix('s3://')}/{played.name}"
    names = frozenset(path.removeprefix(f"{prefix}/") for path in bucket.find(prefix))
    return lambda name: bucket.cat_file(f"{prefix}/{name}"), names


def _is_temporary(name: str) -> bool:
    return name.startswith(".") or name.endswith((".tmp", ".partial"))


def _flow_run_states(stage: Stage, name: str) -> list[str]:
    filters = {"flow_runs": {"name": {"any_": [name]}}}
    answer = httpx.post(f"{stage.url('prefect', direct=True)}/api/flow_runs/filter", json=filters, timeout=30)
    return [str(run["state_type"]) for run in answer.raise_for_status().json()]


def _first_other(records: tuple[Mapping[str, Any], ...], expected: tuple[Mapping[str, Any], ...]) -> str:
    for number, (record, other) in enumerate(zip(records, expected, strict=False), start=1):
        if record != other:
            return f"line {number} is {json.dumps(record)[:300]} where {json.dumps(other)[:300]} is expected"
    return f"it has {len(records)} lines where {len(expected)} are expected"

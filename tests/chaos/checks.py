"""Outputs of a run under faults, compared with the outputs of a reference run."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from mlflow import MlflowClient
from saved_weights import saved_weights

from chaos.configs import MAX_STALENESS, storage_of
from chaos.runner import ChaosRun, run_folder
from chaos.schedule import GROUPS, KILLS, NUM_STEPS
from chaos.servers import Testbed, processes_of
from tasks.training.tracking.metrics import COST_PREFIX

# Fields of a checkpoint record that describe its location, origin and cost instead of the training.
_UNSTABLE_FIELDS = {
    *("state_path", "sampler_path", "mlflow_run_id", "mlflow_model_id"),
    *("flow_run_id", "flow_run_count", "spent"),
}

_POSITION_FIELDS = ("name", "batch", "epoch", "final", "step")
_GROUP = re.compile(r"<b>Group \d+ letter_(.)</b>(: failed)?")
# Metrics that a step of the kind `served` lacks, or has in addition, if the grades of a group were lost. A step whose
# rewards are all equal has no explained variance.
_OF_GRADES = ("env/letter_", "test/env/letter_", "rollout_errors/", "test/rollout_errors/", "explained_variance")

Points = Mapping[tuple[str, int], float | None]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a finished run.

    Attributes:
        weights: every tensor of the final checkpoint, including the optimizer state.
        records: lines of checkpoints.jsonl without the unstable fields.
        points: MLflow values by metric and step; None for metrics of time or cost.
        num_duplicates: number of additional MLflow points with the same metric and step.
        was_replaced: whether another process took over the run while it was frozen, perhaps in the middle of a write.
        statuses: status of each MLflow run with the run's name.
        files: file names in the run directory.
        transcripts: transcript pages in the order of the steps.
        lines: lines of metrics.jsonl.
    """

    weights: Mapping[str, bytes]
    records: tuple[Mapping[str, Any], ...]
    points: Points
    num_duplicates: int
    was_replaced: bool
    statuses: tuple[str, ...]
    files: frozenset[str]
    transcripts: tuple[str, ...]
    lines: tuple[Mapping[str, float], ...]


def collect_outputs(testbed: Testbed, run: ChaosRun) -> Outputs:
    """Read the outputs of a finished run directly from the services."""
    read, files = _directory(testbed, run)
    lines = [json.loads(line) for line in read("checkpoints.jsonl").decode().splitlines()]
    records = tuple({key: value for key, value in line.items() if key not in _UNSTABLE_FIELDS} for line in lines)
    (final,) = [line for line in lines if line.get("final")]
    state = testbed.folder / "engine" / "state"
    client = MlflowClient(testbed.url("mlflow", direct=True))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    mlflow_runs = client.search_runs(experiments, f"attributes.run_name = '{run.name}'")
    points: dict[tuple[str, int], float | None] = {}
    num_points = 0
    for key, step, value in _stored_points(testbed, mlflow_runs[0].info.run_id) if mlflow_runs else ():
        num_points += (key, step) not in points or not key.startswith(COST_PREFIX)  # a repeated step costs again
        points[key, step] = None if _is_cost(key) else value
    return Outputs(
        weights=saved_weights(state, final["state_path"]),
        records=records,
        points=points,
        num_duplicates=num_points - len(points),
        was_replaced=any(injected.fault.action == "freeze and replace" for injected in run.injected),
        statuses=tuple(mlflow_run.info.status for mlflow_run in mlflow_runs),
        files=files,
        transcripts=tuple(read(name).decode() for name in sorted(files) if name.startswith("transcripts-")),
        lines=tuple(map(json.loads, read("metrics.jsonl").decode().splitlines())),
    )


def _is_cost(metric: str) -> bool:
    return metric.startswith(("time/", "throughput/", "cost/")) or metric.endswith("duration_s")


def _stored_points(testbed: Testbed, run_id: str) -> list[tuple[str, int, float]]:
    """Read every point of an MLflow run from the database: its server has no request for thousands of metrics."""
    query = "SELECT key, step, value FROM metrics WHERE run_uuid = ? AND key NOT LIKE 'system/%' ORDER BY timestamp"
    with closing(sqlite3.connect(testbed.folder / "mlflow" / "mlflow.db")) as database:
        return database.execute(query, (run_id,)).fetchall()


def differences(kind: str, outputs: Outputs, reference: Outputs) -> Iterator[str]:
    """Yield the differences between the outputs of a run and those of the reference run."""
    if outputs.statuses != ("FINISHED",):
        yield f"MLflow has {len(outputs.statuses)} runs of its name, with status {', '.join(outputs.statuses)}"
    # Without a checkpoint, asynchronous RL starts over with other rollouts, whose values are logged in addition.
    if outputs.num_duplicates and not outputs.was_replaced and kind != "async":
        yield f"MLflow has {outputs.num_duplicates} duplicate points"
    if outputs.files != reference.files:
        yield f"its directory has extra or missing files: {sorted(outputs.files ^ reference.files)}"
    if (steps := [line["step"] for line in outputs.lines]) != [line["step"] for line in reference.lines]:
        yield f"metrics.jsonl has the steps {steps}"
    compare = {"async": _async_differences, "served": _served_differences}.get(kind, _exact_differences)
    yield from compare(outputs, reference)


def _exact_differences(outputs: Outputs, reference: Outputs) -> Iterator[str]:
    if outputs.weights != reference.weights:
        names = [name for name, tensor in reference.weights.items() if outputs.weights.get(name) != tensor]
        yield f"{len(names)} of {len(reference.weights)} tensors of the final weights and optimizer differ"
    if outputs.records != reference.records:
        yield f"checkpoints.jsonl differs: {_first_difference(outputs.records, reference.records)}"
    if outputs.transcripts != reference.transcripts:
        yield "the sampled completions differ"
    if missing := reference.points.keys() - outputs.points.keys():
        yield f"{len(missing)} points are missing in MLflow, such as {min(missing)}"
    if extra := outputs.points.keys() - reference.points.keys():
        yield f"{len(extra)} points in MLflow are unexpected, such as {min(extra)}"
    for line, expected in zip(outputs.lines, reference.lines, strict=False):
        if names := [key for key in line.keys() | expected if not _is_cost(key) and line.get(key) != expected.get(key)]:
            yield f"step {line['step']} of metrics.jsonl differs in {len(names)} metrics, such as {min(names)}"
    common = reference.points.keys() & outputs.points.keys()
    if changed := [key for key in common if outputs.points[key] != reference.points[key]]:
        yield f"{len(changed)} points in MLflow have a different value, such as {min(changed)}"


def _async_differences(outputs: Outputs, reference: Outputs) -> Iterator[str]:
    """Check what asynchronous RL guarantees: the staleness bound, and that each group is trained on exactly once.

    The assignment of groups to steps depends on timing.
    """
    yield from _position_differences(outputs, reference)
    staleness = {step: value for (key, step), value in outputs.points.items() if key == "async/staleness_max"}
    is_bounded = all(0 <= (value or 0) <= MAX_STALENESS for value in staleness.values())
    if staleness.keys() != set(range(NUM_STEPS)) or not is_bounded:
        yield f"the staleness of its groups by step is {staleness}"
    groups = Counter(tag for page in outputs.transcripts for tag, _ in _GROUP.findall(page))
    if groups.total() != GROUPS * NUM_STEPS or len(groups) != groups.total():
        yield f"it trained on {groups.total()} groups, most often on {groups.most_common(1)}"


def _served_differences(outputs: Outputs, reference: Outputs) -> Iterator[str]:
    """Check a run whose graders were unavailable at times: each lost group is counted, and nothing else is lost.

    Retried groups have other samples, so that weights and values differ.
    """
    yield from _position_differences(outputs, reference)
    for line, page, expected in zip(outputs.lines, outputs.transcripts, reference.transcripts, strict=False):
        groups, expected_groups = _GROUP.findall(page), _GROUP.findall(expected)
        num_failed = sum(bool(failed) for _, failed in groups)
        if [tag for tag, _ in groups] != [tag for tag, _ in expected_groups]:
            yield f"step {line['step']} has the groups {groups}, expected {expected_groups}"
        if num_failed != line["rollout_errors/groups_skipped"] or line["rollout_errors/total"] < num_failed:
            yield f"step {line['step']} lost {num_failed} groups and counts {line['rollout_errors/groups_skipped']}"
    different = outputs.points.keys() ^ reference.points.keys()
    if names := [point for point in different if not point[0].startswith(_OF_GRADES)]:
        yield f"{len(names)} points in MLflow are missing or unexpected, such as {min(names)}"


def _position_differences(outputs: Outputs, reference: Outputs) -> Iterator[str]:
    """Compare the steps of the checkpoints and the names of the weights."""
    if names := outputs.weights.keys() ^ reference.weights.keys():
        yield f"{len(names)} tensors of the final weights are missing or unexpected"
    steps, expected = (
        [[record.get(key) for key in _POSITION_FIELDS] for record in side.records] for side in (outputs, reference)
    )
    if steps != expected:
        yield f"checkpoints.jsonl has the steps {steps}, expected {expected}"


def leftovers(testbed: Testbed, run: ChaosRun) -> Iterator[str]:
    """Yield leaked processes, leftover temporary files, tracebacks and unfinished flow runs of a finished run."""
    deadline = time.monotonic() + 60
    while (pids := processes_of(f"{testbed.mark}flow:")) and time.monotonic() < deadline:
        time.sleep(0.1)
    if pids:
        yield f"its processes {pids} are still running"
    # MLflow's client copies a file to TMPDIR to upload it; a kill during the upload leaves the copy.
    num_kills = sum(injected.fault.target == "flow" for injected in run.injected if injected.fault.action in KILLS)
    for name, num_allowed in (("tmp", num_kills), ("home", 0)):
        folder = run_folder(testbed, run.name) / name
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        if len(files) > num_allowed:
            yield f"{len(files)} files remain in its {name}, such as {files[0]}"
    if files := [path.name for path in (testbed.folder / "engine" / "state").rglob("*") if _is_temporary(path.name)]:
        yield f"the engine has leftover temporary files: {files[:3]}"
    if "Traceback" in (run_folder(testbed, run.name) / "output.log").read_text(errors="replace"):
        yield "its command printed a traceback"
    states = _flow_run_states(testbed, run.name)
    # A second start can find the run finished, and then completes too.
    most = 1 + sum(injected.fault.action in ("start twice", "freeze and replace") for injected in run.injected)
    if not 1 <= states.count("COMPLETED") <= most:
        yield f"its Prefect flow runs have the states {', '.join(states)}"


def _directory(testbed: Testbed, run: ChaosRun) -> tuple[Callable[[str], bytes], frozenset[str]]:
    """Return a function that reads a file of the run directory, and the file names."""
    storage = storage_of(testbed, run.schedule)
    if run.schedule.storage == "local":
        folder = Path(storage) / run.name
        return lambda name: (folder / name).read_bytes(), frozenset(path.name for path in folder.iterdir())
    bucket, prefix = testbed.bucket(), f"{storage.removeprefix('s3://')}/{run.name}"
    names = frozenset(path.removeprefix(f"{prefix}/") for path in bucket.find(prefix))
    return lambda name: bucket.cat_file(f"{prefix}/{name}"), names


def _is_temporary(name: str) -> bool:
    return name.startswith(".") or name.endswith((".tmp", ".partial"))


def _flow_run_states(testbed: Testbed, name: str) -> list[str]:
    filters = {"flow_runs": {"name": {"any_": [name]}}}
    response = httpx.post(f"{testbed.url('prefect', direct=True)}/api/flow_runs/filter", json=filters, timeout=120)
    return [str(flow_run["state_type"]) for flow_run in response.raise_for_status().json()]


def _first_difference(records: tuple[Mapping[str, Any], ...], expected: tuple[Mapping[str, Any], ...]) -> str:
    for number, (record, expected_record) in enumerate(zip(records, expected, strict=False), start=1):
        if differences := list(_differences("", record, expected_record)):
            return f"line {number} has {'; '.join(differences)}"
    return f"it has {len(records)} lines, expected {len(expected)}"


def _differences(path: str, value: object, expected: object) -> Iterator[str]:
    """Yield each difference between two JSON values with its path of field names."""
    if isinstance(value, dict) and isinstance(expected, dict):
        for name in sorted({*value, *expected}):
            yield from _differences(f"{path}.{name}", value.get(name), expected.get(name))
    elif value != expected:
        yield f"{path} {json.dumps(value)[:200]}, expected {json.dumps(expected)[:200]}"

"""Model of the servers' load by the number of runs, and parsers of the servers' request counters."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_REQUEST = re.compile(r'"(?P<method>[A-Z]+) (?P<path>/[^ ?"]*)[^"]*" \d{3}')
_ID = re.compile(r"\b(m-)?([0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})\b|(?<=/)\d+(?=/)")
_SAMPLE = re.compile(r"^(?P<name>\w+)(\{(?P<labels>.*)\})? (?P<value>\S+)$")


def count_requests(access_log: str) -> Counter[str]:
    """Count the requests of an access log by method and path, with `ID` in place of ids.

    >>> count_requests('"GET /api/flow_runs/0123456789abcdef0123456789abcdef?limit=1 HTTP/1.1" 200 OK')
    Counter({'GET /api/flow_runs/ID': 1})
    """
    requests = _REQUEST.finditer(access_log)
    return Counter(f"{request['method']} {_ID.sub('ID', request['path'])}" for request in requests)


def sum_counter(metrics: str, name: str, label: str) -> Counter[str]:
    """Sum a Prometheus counter by the values of one label.

    >>> sum_counter('s3_total{code="200",type="GET"} 2\\ns3_total{code="404",type="GET"} 1', "s3_total", "type")
    Counter({'GET': 3})
    """
    total: Counter[str] = Counter()
    for line in metrics.splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample["name"] == name:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"] or ""))
            total[labels[label]] += round(float(sample["value"]))
    return total


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements over a period in which `num_runs` runs train.

    Attributes:
        name: name of the setup in `benchmarks.scale`, or `idle` without runs.
        step_s: mean seconds of a step of a run; 0 without runs.
        num_checkpoints: saved checkpoints of all runs.
        cores: mean cores in use, by `prefect`, `mlflow` and so on for the servers, `service` for the Tinker service,
            and `flows` for all processes of runs.
        counts: growth of each counter per step of a run.
        event_lag_s: median and maximum seconds from an event to its row in Prefect's database.
        task_run_lag_s: the same from the start of a task run to its row.
        point_lag_s: the same from a step's metrics to their rows in MLflow's database.
    """

    name: str
    num_runs: int
    step_s: float
    num_steps: int
    num_checkpoints: int
    cores: Mapping[str, float]
    counts: Mapping[str, float] = field(default_factory=dict)
    event_lag_s: tuple[float, float] = (0.0, 0.0)
    task_run_lag_s: tuple[float, float] = (0.0, 0.0)
    point_lag_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one server, in cores.

    Attributes:
        idle: cores in use without a run.
        per_run: cores in use for every open run, whatever the duration of its steps.
        cpu_s: processor seconds of a step.
    """

    idle: float
    per_run: float
    cpu_s: float

    def cores(self, num_runs: float, step_s: float) -> float:
        """Return the cores in use by runs whose steps take `step_s` seconds."""
        return self.idle + num_runs * (self.per_run + self.cpu_s / step_s)

    def max_runs(self, step_s: float, cores: float = 1.0) -> float:
        """Return the number of runs that use all the cores; infinite if a run uses none."""
        per_run = self.cores(1, step_s) - self.idle
        return (cores - self.idle) / per_run if per_run > 0 else float("inf")


def fit_load(idle: float, fast: tuple[float, float], slow: tuple[float, float]) -> Load:
    """Fit the load to one run at two step durations.

    Args:
        idle: cores in use without a run.
        fast: seconds of a step, and cores in use by one run with such steps.
        slow: the same with longer steps.

    Raises:
        ValueError: the slow steps are not longer than the fast ones.
    """
    (fast_s, fast_cores), (slow_s, slow_cores) = fast, slow
    if slow_s <= fast_s:
        raise ValueError(f"the slow steps take {slow_s:g} s, the fast ones {fast_s:g} s: measure longer slow steps")
    cpu_s = max(0.0, (fast_cores - slow_cores) / (1 / fast_s - 1 / slow_s))
    return Load(idle, max(0.0, slow_cores - idle - cpu_s / slow_s), cpu_s)


def fit_servers(windows: Sequence[Window]) -> dict[str, Load]:
    """Fit the load of each process to the windows `idle`, `fast` (a run with short steps) and `1` (with long steps)."""
    by_name = {window.name: window for window in windows}
    idle, fast, slow = by_name["idle"], by_name["fast"], by_name["1"]
    return {
        part: fit_load(idle.cores.get(part, 0.0), (fast.step_s, fast.cores[part]), (slow.step_s, slow.cores[part]))
        for part in slow.cores
    }


def per_step(before: Mapping[str, float], after: Mapping[str, float], num_steps: int) -> dict[str, float]:
    """Return by how much each counter grew per step; counters that did not grow are left out.

    Raises:
        ValueError: there is no step.
    """
    if num_steps < 1:
        raise ValueError(f"no counts per step: the window has {num_steps} steps; make it longer")
    growth = {name: after[name] - before.get(name, 0) for name in after}
    return {name: increase / num_steps for name, increase in sorted(growth.items()) if increase}


def per_checkpoint(
    counts_with: Mapping[str, float], counts_without: Mapping[str, float], steps_per_checkpoint: float
) -> dict[str, float]:
    """Return by how much each counter grew per checkpoint, from counts per step with and without checkpoints."""
    growth = {name: number - counts_without.get(name, 0.0) for name, number in counts_with.items()}
    return {name: increase * steps_per_checkpoint for name, increase in growth.items() if increase > 0}


def sum_by_group(counts: Mapping[str, float]) -> dict[str, float]:
    """Add up the requests of each server; counts of database rows stay separate, by table.

    >>> sum_by_group({"mlflow GET /a": 1.0, "mlflow POST /b": 2.0, "mlflow rows metrics": 50.0})
    {'mlflow requests': 3.0, 'mlflow rows metrics': 50.0}
    """
    total: dict[str, float] = defaultdict(float)
    for name, number in counts.items():
        server, detail = name.split(" ", 1)
        if not detail.startswith("result:"):  # the service counts results in addition to their requests
            total[name if detail.startswith("rows ") else f"{server} requests"] += number
    return dict(total)

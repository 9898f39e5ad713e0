"""Load of the Prefect, MLflow and S3 servers by 1, 10 and 100 concurrent runs, against a model fitted to one run.

The runs are sft runs with two terms. The service that does nothing has a clock that ticks once per step, to imitate the
hosted service. Ten runs share a process. The model of each server (`benchmarks.scale_model`) is fitted to one
run with steps of 1 s and of 10 s, and to an idle window after the first runs; the windows with 10 and with 100 runs
check its predictions. All processes share the machine, so the cores of the flows limit the number of runs, too.

The environment variable `SCALE` selects setups in addition to those that the model needs, as in
`SCALE="10 segment" python -m benchmarks scale`; the names are `checkpoints`, `10`, `100`, `segment`, `postgres` and
`100-postgres`. Without it, all setups run but those with 100 runs: `100` fails on SQLite and two cores
(`docs/scale.md`), and `100-postgres` takes a quarter of an hour.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from rich.table import Table
from sqlalchemy import Engine, create_engine, text
from tqdm import tqdm

from benchmarks.null_server import null_server
from benchmarks.scale_model import (
    Window,
    count_requests,
    fit_servers,
    per_checkpoint,
    per_step,
    sum_by_group,
    sum_counter,
)
from benchmarks.scratch import environment, scratch_home
from blocks.files.local import home
from blocks.servers.processes import free_port, prefect_server_command, prefect_server_env
from deployments.servers.health import is_healthy
from engine.models import resolve_model
from tests.mlflow_process import running_mlflow
from tests.postgres_server import running_postgres
from tests.s3_server import ACCESS_KEY, SECRET_KEY, running_s3

RUNS_PER_PROCESS = 10
NEVER = 1_000_000
PARTS = ("prefect", "mlflow", "s3", "postgres", "service", "flows")
CHECKED = ("10", "100")  # setups that the model predicts
# The background load of the S3 server varies by more than a run adds.
MODELLED = ("prefect", "mlflow", "service", "flows")
PREFECT_TABLES = (
    "artifact",
    "event_resources",
    "events",
    "flow_run_state",
    "log",
    "task_run",
    "task_run_state",
)
# Connections of MLflow's server to its database. With its default of 5, and up to 10 more, runs that log at the same
# time get errors.
POOL_SIZE = 50
POLL_S = 0.5
START_TIMEOUT_S = 300.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Setup:
    """Runs of one measured window.

    Attributes:
        cycle_s: seconds of a step.
        window_s: seconds that are measured.
        postgres: Prefect and MLflow use PostgreSQL instead of SQLite.
    """

    name: str
    num_runs: int
    cycle_s: float
    window_s: float
    granularity: str = "task"
    checkpoint_every: int = NEVER
    postgres: bool = False

    @property
    def num_steps(self) -> int:
        """Steps of a run: it trains while all groups of runs start, and during the window."""
        start_s = START_TIMEOUT_S * math.ceil(self.num_runs / RUNS_PER_PROCESS)
        return math.ceil((start_s + self.window_s) / self.cycle_s)


@dataclass(frozen=True, slots=True)
class Team:
    """Running servers, their processes and databases."""

    folder: Path
    api: str
    tracking: str
    s3_metrics: str
    processes: Mapping[str, psutil.Process]
    prefect_database: Engine
    mlflow_database: Engine

    def counters(self, service: str) -> dict[str, int]:
        """Read all counters: requests, and rows of databases."""
        counters = {f"service {name}": number for name, number in _service_counts(service).items()}
        for server in ("prefect", "mlflow"):
            log = (self.folder / f"{server}.log").read_text(errors="replace")
            counters |= {f"{server} {name}": number for name, number in count_requests(log).items()}
        metrics = httpx.get(self.s3_metrics).text
        requests = sum_counter(metrics, "SeaweedFS_s3_request_total", "type")
        counters |= {f"s3 {name}": number for name, number in requests.items()}
        with self.prefect_database.connect() as database:
            for table in PREFECT_TABLES:
                counters[f"prefect rows {table}"] = database.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
        with self.mlflow_database.connect() as database:
            counters["mlflow rows metrics"] = database.execute(text("SELECT count(*) FROM metrics")).scalar_one()
        return counters


SETUPS = (
    Setup("fast", 1, cycle_s=1.0, window_s=40),
    Setup("checkpoints", 1, cycle_s=1.0, window_s=30, checkpoint_every=5),
    Setup("1", 1, cycle_s=10.0, window_s=60),
    Setup("10", 10, cycle_s=10.0, window_s=60),
    Setup("segment", 10, cycle_s=10.0, window_s=60, granularity="segment"),
    Setup("100", 100, cycle_s=10.0, window_s=90),
    Setup("postgres", 10, cycle_s=10.0, window_s=60, postgres=True),
    Setup("100-postgres", 100, cycle_s=30.0, window_s=120, postgres=True),
)


def measure(*, setups: Sequence[Setup] = SETUPS, idle_s: float = 30.0) -> Table:
    """Measure every setup; return the load of each server, measured and predicted."""
    names = os.environ.get("SCALE", "").split()
    names = names or [setup.name for setup in setups if not setup.name.startswith("100")]
    chosen = [setup for setup in setups if setup.name in (*names, "fast", "1")]
    windows: list[Window] = []
    for postgres in (False, True):
        if same_store := [setup for setup in chosen if setup.postgres == postgres]:
            with scratch_home() as folder, _team(folder, postgres=postgres) as team:
                for number, setup in enumerate(tqdm(same_store, desc="scale")):
                    windows.append(_window(team, setup))
                    tqdm.write(json.dumps(asdict(windows[-1])))
                    if number == 0:  # not earlier, because the S3 server's background work starts with its first data
                        windows.append(_idle(team, "idle on PostgreSQL" if postgres else "idle", idle_s))
                        tqdm.write(json.dumps(asdict(windows[-1])))
    return _tables(windows)


def _tables(windows: Sequence[Window]) -> Table:
    tables = Table.grid(padding=(1, 0))
    tables.add_row(_counts_table(windows))
    tables.add_row(_loads_table(windows))
    return tables


def _counts_table(windows: Sequence[Window]) -> Table:
    """Build the table of counts per step of each setup, and per checkpoint."""
    columns = {window.name: window.counts for window in windows if window.num_runs}
    by_name = {window.name: window for window in windows}
    if "checkpoints" in by_name:
        saving = by_name["checkpoints"]
        steps_per_checkpoint = saving.num_steps / saving.num_checkpoints
        columns["per checkpoint"] = per_checkpoint(saving.counts, by_name["fast"].counts, steps_per_checkpoint)
    table = Table("count", *columns, title="scale: requests and rows per step of a run, by setup")
    sums = [sum_by_group(counts) for counts in columns.values()]
    for name in sorted({name for counts in sums for name in counts}):
        table.add_row(name, *(f"{counts.get(name, 0.0):.2f}" for counts in sums))
    return table


def _loads_table(windows: Sequence[Window]) -> Table:
    loads = fit_servers(windows)
    table = Table(title="scale: cores in use (predicted), and lag in seconds, median / maximum")
    for header in ("setup", "runs", "step", *PARTS, "events", "task runs", "points"):
        table.add_column(header)
    for window in windows:
        cells = [window.name, str(window.num_runs), f"{window.step_s:.1f} s"]
        for part in PARTS:
            cores = f"{window.cores[part]:.3f}" if part in window.cores else "-"
            is_predicted = window.name in CHECKED and part in MODELLED
            predicted = f" ({loads[part].cores(window.num_runs, window.step_s):.3f})" if is_predicted else ""
            cells.append(cores + predicted)
        lags = (window.event_lag_s, window.task_run_lag_s, window.point_lag_s) if window.num_runs else ()
        table.add_row(*cells, *(f"{median:.1f} / {worst:.1f}" for median, worst in lags))
    costs = "; ".join(
        f"{part} {load.idle:.3f} cores idle, {load.per_run * 1000:.2f} mcores per run, {load.cpu_s * 1000:.1f} ms "
        f"per step, one core at {load.max_runs(10.0):.0f} runs with steps of 10 s"
        for part, load in loads.items()
        if part in MODELLED
    )
    table.caption = costs
    return table


@contextmanager
def _team(folder: Path, *, postgres: bool) -> Iterator[Team]:
    """Run a Prefect, an MLflow and an S3 server."""
    with ExitStack() as stack:
        prefect_url, mlflow_url = prefect_server_env()["PREFECT_API_DATABASE_CONNECTION_URL"], ""
        processes: dict[str, psutil.Process] = {}
        if postgres:
            address = stack.enter_context(running_postgres())
            for database in ("prefect", "mlflow"):
                _create_database(address, database)
            prefect_url = f"postgresql+asyncpg://{address}/prefect"
            mlflow_url = f"postgresql+psycopg://{address}/mlflow"
            processes["postgres"] = _find(psutil.process_iter(), f"port={address.rpartition(':')[2]}")
        s3 = stack.enter_context(running_s3(folder / "s3"))
        tracking = stack.enter_context(running_mlflow(folder, mlflow_url, POOL_SIZE))
        api, processes["prefect"] = stack.enter_context(_prefect_server(folder, prefect_url))
        processes["s3"] = psutil.Process(s3.process.pid)
        processes["mlflow"] = _find(psutil.Process().children(), "mlflow server")
        stack.enter_context(
            environment(
                AWS_ACCESS_KEY_ID=ACCESS_KEY,
                AWS_SECRET_ACCESS_KEY=SECRET_KEY,
                AWS_ENDPOINT_URL=s3.endpoint_url,
                PREFECT_API_URL=api,
                TINKER_API_KEY="tml-null",
            )
        )
        yield Team(
            folder,
            api,
            tracking,
            f"http://127.0.0.1:{s3.ports['metricsPort']}/metrics",
            processes,
            create_engine(prefect_url.replace("+aiosqlite", "").replace("+asyncpg", "+psycopg")),
            create_engine(mlflow_url or f"sqlite:///{folder / 'mlflow.db'}"),
        )


@contextmanager
def _prefect_server(folder: Path, database: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Prefect server with an access log; yields the URL of its API and its process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    settings = {"PREFECT_API_DATABASE_CONNECTION_URL": database, "PREFECT_SERVER_LOGGING_LEVEL": "INFO"}
    with (folder / "prefect.log").open("wb") as log:
        process = subprocess.Popen(
            prefect_server_command(port), env={**os.environ, **prefect_server_env(), **settings}, stdout=log, stderr=log
        )
    try:
        while not is_healthy(f"{url}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"the Prefect server exited: {(folder / 'prefect.log').read_text()[-2000:]}")
            time.sleep(POLL_S)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _create_database(address: str, name: str) -> None:
    engine = create_engine(f"postgresql+psycopg://{address}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()


def _find(processes: Iterator[psutil.Process] | Sequence[psutil.Process], words: str) -> psutil.Process:
    for process in processes:
        with suppress(psutil.Error):  # a process that has ended
            if words in " ".join(process.cmdline()):
                return process
    raise RuntimeError(f"no process has {words!r} in its command line")


def _idle(team: Team, name: str, seconds: float) -> Window:
    before = {part: _processor_s([process]) for part, process in team.processes.items()}
    time.sleep(seconds)
    cores = {part: (_processor_s([process]) - before[part]) / seconds for part, process in team.processes.items()}
    return Window(name, 0, 0.0, 0, 0, cores)


def _window(team: Team, setup: Setup) -> Window:
    """Start the runs of a setup, measure them once all of them train, and kill them."""
    model = str(resolve_model("tiny", home() / "cache"))
    with null_server(model, setup.cycle_s) as service, _runs(team, setup, model, service) as flows:
        processes = {part: [process] for part, process in team.processes.items()}
        processes |= {"flows": flows, "service": [_find(psutil.Process().children(), "benchmarks.null_server")]}
        before, started, began = team.counters(service), time.monotonic(), time.time()
        processor_before = {part: _processor_s(of_part) for part, of_part in processes.items()}
        with _point_lags(team) as point_lags:
            time.sleep(setup.window_s)
        elapsed_s = time.monotonic() - started
        processor_after = {part: _processor_s(of_part) for part, of_part in processes.items()}
        after = team.counters(service)
        time.sleep(5)  # Prefect writes rows with a delay
        event_lags = _lags(team, "SELECT occurred, recorded FROM events", began)
        task_run_lags = _lags(team, "SELECT start_time, created FROM task_run WHERE start_time IS NOT NULL", began)
    num_steps = after["service result:optim_step"] - before.get("service result:optim_step", 0)
    saved = "service result:save_weights"
    return Window(
        setup.name,
        setup.num_runs,
        setup.num_runs * elapsed_s / num_steps,
        num_steps,
        after.get(saved, 0) - before.get(saved, 0),
        {part: (processor_after[part] - processor_before[part]) / elapsed_s for part in processes},
        per_step(before, after, num_steps),
        _median_and_maximum(event_lags),
        _median_and_maximum(task_run_lags),
        _median_and_maximum(point_lags),
    )


@contextmanager
def _runs(team: Team, setup: Setup, model: str, service: str) -> Iterator[list[psutil.Process]]:
    """Run sft in processes of ten runs; yields the processes once every run has logged two steps."""
    path, log = team.folder / f"{setup.name}.yaml", team.folder / f"{setup.name}.log"
    path.write_text(yaml.safe_dump(_config(team, setup, model, service)))
    began, processes = time.time(), []
    try:
        for first in range(0, setup.num_runs, RUNS_PER_PROCESS):
            num_runs = min(RUNS_PER_PROCESS, setup.num_runs - first)
            command = [sys.executable, "-m", "benchmarks.scale_runs", str(path), str(first), str(num_runs)]
            with log.open("ab") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT))
            # Prefect on SQLite answers 503 if many runs start at the same time.
            _wait_for_training(team, began, first + num_runs, processes, log)
        yield [psutil.Process(process.pid) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_for_training(
    team: Team, since: float, num_runs: int, processes: Sequence[subprocess.Popen[bytes]], log: Path
) -> None:
    deadline = time.time() + START_TIMEOUT_S
    while (num_training := _num_training(team, since)) < num_runs:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a process of runs exited: {log.read_text(errors='replace')[-2000:]}")
        if time.time() > deadline:
            raise RuntimeError(f"only {num_training} of {num_runs} runs trained within {START_TIMEOUT_S:g} s")
        time.sleep(1)


def _config(team: Team, setup: Setup, model: str, service: str) -> dict[str, Any]:
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": 16}
    return {
        "model": model,
        "base_url": service,
        "lora_rank": 4,
        "num_steps": setup.num_steps,
        "num_epochs": setup.num_steps,
        "eval_every": 0,
        "checkpoint_every": setup.checkpoint_every,
        "granularity": setup.granularity,
        "storage": f"s3://runs/{setup.name}",
        "tracking": team.tracking,
        "data": {"builder": "examples.gsm8k:Gsm8kBuilder", "params": {"common_config": common}},
        "objective": {"regularizers": [{"name": name, "weight": 0.01} for name in ("confidence", "elastic_net")]},
    }


def _points(team: Team, since: float) -> set[tuple[str, int, int]]:
    """Return run, step and time in milliseconds of the steps that MLflow has stored since a time."""
    query = "SELECT run_uuid, step, timestamp FROM metrics WHERE key = 'progress/batch' AND timestamp >= :since"
    with team.mlflow_database.connect() as database:
        return {(row[0], row[1], row[2]) for row in database.execute(text(query), {"since": int(since * 1000)})}


def _num_training(team: Team, since: float) -> int:
    return len({run for run, step, _ in _points(team, since) if step >= 1})


@contextmanager
def _point_lags(team: Team) -> Iterator[list[float]]:
    """Measure the seconds until the points of new steps are stored, to half a second."""
    lags: list[float] = []
    stop, since = threading.Event(), time.time() - 60
    stored = _points(team, since)

    def poll() -> None:
        while not stop.wait(POLL_S):
            points, now = _points(team, since), time.time()
            lags.extend(now - logged_ms / 1000 for _, _, logged_ms in points - stored)
            stored.update(points)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield lags
    finally:
        stop.set()
        thread.join()


def _lags(team: Team, query: str, since: float) -> list[float]:
    """Return the seconds between the two times of each row of a query whose first time is after `since`."""
    with team.prefect_database.connect() as database:
        rows = [(_epoch_s(row[0]), _epoch_s(row[1])) for row in database.execute(text(query))]
    return [stored - occurred for occurred, stored in rows if occurred >= since]


def _epoch_s(value: str | datetime) -> float:
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _median_and_maximum(values: Sequence[float]) -> tuple[float, float]:
    return (statistics.median(values), max(values)) if values else (0.0, 0.0)


def _service_counts(service: str) -> dict[str, int]:
    return httpx.get(f"{service}/api/v1/counts").json()


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor seconds of processes and their living descendants."""
    family = {relative for process in processes for relative in (process, *process.children(recursive=True))}
    times = [member.cpu_times() for member in family]
    return sum(time.user + time.system for time in times)

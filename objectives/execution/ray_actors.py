"""Calls of terms in actors of a Ray cluster: the cluster at ``RAY_ADDRESS``, or a local one for the run."""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.cluster import Shared, decode_result, encode_call, first_line, library, num_workers, too_late
from objectives.execution.messages import encode
from objectives.execution.process import START_S, importable, python_path
from objectives.execution.respond import end_with_parent, load_term, respond
from objectives.term import Regularizer, Term


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Ray connection of this process; `end` is None if the program connected before."""

    ray: ModuleType
    end: Callable[[], None] | None

    def works(self) -> bool:
        return self.ray.is_initialized()

    def close(self) -> None:
        if self.end is not None:
            self.end()


class Answers:
    """Ray actor that calls one term in its process."""

    def __init__(self, module: str, name: str) -> None:
        torch.set_num_threads(1)
        end_with_parent()  # Ray waits for busy actors.
        self._term: Term | None = None
        self._why_not = ""
        try:
            self._term = load_term(module, name)
        except ObjectiveError as error:
            self._why_not = str(error)

    def why_not(self) -> str:
        """Return the reason why the actor cannot start; empty if it is ready."""
        return self._why_not

    def answer(self, doing: str, body: bytes) -> bytes:
        """Run a call; return an encoded pair of success and result or error message."""
        assert self._term is not None
        fields, arguments = pickle.loads(body)
        return respond(self._term, doing, fields, arguments, encode)


class TermActor:
    """Owner of an actor that calls one term, one call at a time; it is killed at the time limit and restarted."""

    def __init__(self, term: Term) -> None:
        self._term = importable(term)
        self._lock = threading.Lock()
        self._actor: Any = None  # a handle, whose methods Ray creates
        self._cluster: RayCluster | None = None

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> object:
        """Call the function `objectives.execution.respond.FUNCTIONS[doing]` in the actor.

        Raises:
            ObjectiveError: the function raised.
            ExecutionError: the call exceeded the term's time limit, its worker died, no worker can start or import the
                term, or an argument cannot be pickled.
        """
        body = encode_call(regularizer, arguments)
        with self._lock:
            self._start()
            answer = self._get(self._actor.answer.remote(doing, body), regularizer.timeout_s, too_late)
        return decode_result(answer)

    def close(self) -> None:
        """End the actor and release the cluster."""
        with self._lock:
            if self._actor is not None:
                self._kill()
            RAY.leave(self)

    def _start(self) -> None:
        cluster = RAY.use(self)
        if self._actor is not None and self._cluster is cluster:
            return
        self._cluster = cluster
        self._actor = cluster.ray.remote(Answers).options(max_restarts=0).remote(*self._term)
        why_not = self._get(self._actor.why_not.remote(), START_S, _not_started)
        if why_not:
            self._kill()
            raise ExecutionError(why_not)

    def _get(self, reference: object, timeout_s: float | None, late: Callable[[float | None], str]) -> Any:
        assert self._cluster is not None
        ray = self._cluster.ray
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            self._kill()
            raise ExecutionError(late(timeout_s)) from error
        except Exception as error:
            self._kill()
            raise ExecutionError(
                f"its worker of the Ray cluster did not finish it ({first_line(error)}); check for a crash in its "
                "dependencies, too little memory, or a package missing on the workers"
            ) from error

    def _kill(self) -> None:
        actor, self._actor = self._actor, None
        assert self._cluster is not None
        if self._cluster.works():
            self._cluster.ray.kill(actor)


def _not_started(timeout_s: float | None) -> str:
    return f"the Ray cluster took longer than {timeout_s:g} s to start a worker for it; add workers to the cluster"


def _open() -> RayCluster:
    ray = library("ray")
    if ray.is_initialized():
        return RayCluster(ray, end=None)
    address = os.environ.get("RAY_ADDRESS")
    try:
        if not address:
            return RayCluster(ray, _start_local(ray))
        ray.init(address, logging_level="warning")
    except Exception as error:
        where = f"at {address} cannot be reached" if address else "of this machine could not be started"
        raise ExecutionError(f"the Ray cluster {where} ({first_line(error)})") from error
    return RayCluster(ray, ray.shutdown)


def _start_local(ray: ModuleType) -> Callable[[], None]:
    """Start a local cluster; return a function that ends it. Ray's cluster ends with the thread that started it."""
    started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    to_end = threading.Event()

    def run() -> None:
        # The folder contains sockets, whose paths must be short.
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        try:
            ray.init(
                "local",
                num_cpus=num_workers(),
                include_dashboard=False,
                object_store_memory=2**28,
                runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
                logging_level="error",
                _temp_dir=folder,
            )
            started.put(None)
            to_end.wait()
        except Exception as error:  # noqa: BLE001  # raised in the waiting thread below
            started.put(error)
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=run, name="local-ray", daemon=True)
    thread.start()

    def end() -> None:
        to_end.set()
        thread.join()

    if (error := started.get()) is not None:
        raise error
    return end


RAY = Shared(_open, RayCluster.works, RayCluster.close)

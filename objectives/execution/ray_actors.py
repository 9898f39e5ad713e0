"""Calls of terms in actors of a Ray cluster: the one that ``RAY_ADDRESS`` names, or one for the run alone."""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.cluster import Shared, body_of, first_line, library, num_workers, returned, too_late
from objectives.execution.messages import encode
from objectives.execution.process import START_S, importable, python_path
from objectives.execution.respond import end_with_parent, load_term, respond
from objectives.regularizer import Regularizer
from objectives.term import Term


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A connection of this process, and what ends it: nothing where the program had it already."""

    ray: Any
    end: Callable[[], None] | None

    def works(self) -> bool:
        return self.ray.is_initialized()

    def close(self) -> None:
        if self.end is not None:
            self.end()


class Answers:
    """The actor: a process of a term's own."""

    def __init__(self, module: str, name: str) -> None:
        torch.set_num_threads(1)
        end_with_parent()  # Ray waits for what is busy
        self._term: Term | None = None
        self._why_not = ""
        try:
            self._term = load_term(module, name)
        except ObjectiveError as error:
            self._why_not = str(error)

    def why_not(self) -> str:
        """What stands in its way; nothing, once it is ready."""
        return self._why_not

    def answer(self, doing: str, body: bytes) -> bytes:
        """Whether the call succeeded, and what it returned or why it failed."""
        assert self._term is not None
        fields, arguments = pickle.loads(body)
        return respond(self._term, doing, fields, arguments, encode)


class TermActor:
    """An actor that calls one term, one call at a time; killed where a call takes too long, and then started anew."""

    def __init__(self, term: Term) -> None:
        self._term = importable(term)
        self._lock = threading.Lock()
        self._actor: Any = None
        self._cluster: RayCluster | None = None

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> Any:
        """What `objectives.execution.respond.FUNCTIONS` has under `doing`, in that actor.

        Raises:
            ObjectiveError: what the function raises.
            ExecutionError: it took longer than the term's limit, its worker died, none can be started or can import
                the term, or an argument cannot be pickled.
        """
        body = body_of(regularizer, arguments)
        with self._lock:
            self._start()
            answer = self._get(self._actor.answer.remote(doing, body), regularizer.timeout_s, too_late)
        return returned(answer)

    def close(self) -> None:
        """End the actor, and let go of the cluster."""
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

    def _get(self, reference: Any, timeout_s: float | None, late: Any) -> Any:
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
                f"its worker of the Ray cluster did not finish it ({first_line(error)}): look for a crash of what it "
                "calls, for too little memory, or for a package that the workers lack"
            ) from error

    def _kill(self) -> None:
        actor, self._actor = self._actor, None
        assert self._cluster is not None
        if self._cluster.works():
            self._cluster.ray.kill(actor)


def _not_started(timeout_s: float | None) -> str:
    return f"the Ray cluster took longer than {timeout_s:g} s to start a worker for it: give the cluster more of them"


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


def _start_local(ray: Any) -> Callable[[], None]:
    """A cluster of this process; it ends with the thread that started it, so that one stays until it is to end."""
    started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    to_end = threading.Event()

    def run() -> None:
        # Sockets lie in it, whose paths are short.
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
        except Exception as error:  # noqa: BLE001  # raised again below, where it is waited for
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

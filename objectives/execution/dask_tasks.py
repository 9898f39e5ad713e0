"""Calls of terms as tasks of a Dask cluster: the one that Dask is set to, or one for the run alone."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.cluster import Shared, body_of, first_line, library, returned, too_late
from objectives.execution.messages import encode, receive
from objectives.execution.process import START_S, importable, start_python
from objectives.execution.respond import load_term, respond
from objectives.regularizer import Regularizer
from objectives.term import Term

# What a nanny gives a worker to leave by itself, seconds: until then the scheduler might send it other tasks.
_LEAVE_S = 0.1
_STOP_S = 20.0

# The address of the worker that began with a task; None when the task is done.
News = queue.SimpleQueue[str | None]


class LocalDask:
    """A cluster of this machine, in a process that ends with this one.

    Attributes:
        address: of its scheduler.
        security: the keys without which nobody can connect.
    """

    def __init__(self) -> None:
        self._process, self._connection = start_python("objectives.execution.local_dask")
        try:
            if not self._connection.poll(START_S):
                raise ExecutionError(f"the local Dask cluster took longer than {START_S:g} s to start")
            self.address, self.security = receive(self._connection)
        except (EOFError, OSError) as error:
            self.close()
            raise ExecutionError(
                "the local Dask cluster ended while it started: look at what it wrote to the error output"
            ) from error
        except ExecutionError:
            self.close()
            raise

    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it with all of its workers."""
        self._connection.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class DaskCluster:
    """A client with what it hears of its tasks; `local` where the cluster was started for it."""

    client: Any
    local: LocalDask | None
    news: dict[str, News] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        return f"tinker-flows-{self.client.id}"

    def works(self) -> bool:
        return self.client.status == "running" and (self.local is None or self.local.runs())

    def close(self) -> None:
        self.client.close()
        if self.local is not None:
            self.local.close()

    def hear(self, event: tuple[float, dict[str, str]]) -> None:
        """A worker says that it begins with a task."""
        message = event[1]
        if (news := self.news.get(message["key"])) is not None:
            news.put(message["worker"])

    def replace(self, worker: str) -> None:
        """Kill a worker; its nanny starts another.

        Raises:
            ExecutionError: it has no nanny.
        """
        known = self.client.scheduler_info()["workers"].get(worker)
        if known is None:  # it is gone
            return
        if known["nanny"] is None:
            raise ExecutionError(
                f"goes on in the worker {worker}, which has no nanny to kill it: start workers with their nanny"
            )
        self.client.run(kill_worker, workers=[worker], nanny=True, on_error="ignore")


class TermTasks:
    """Calls one term on whichever worker is free; one that takes too long is killed and started anew."""

    def __init__(self, term: Term) -> None:
        self._term = importable(term)

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> Any:
        """What `objectives.execution.respond.FUNCTIONS` has under `doing`, on a worker.

        Raises:
            ObjectiveError: what the function raises.
            ExecutionError: it took longer than the term's limit, its worker died, no worker is free or can import
                the term, or an argument cannot be pickled.
        """
        body = body_of(regularizer, arguments)
        cluster = DASK.use(self)
        key = f"term-{regularizer.name}-{doing}-{uuid4().hex}"
        news = cluster.news[key] = queue.SimpleQueue()
        try:
            future = cluster.client.submit(
                answer_task, cluster.topic, key, *self._term, doing, body, key=key, pure=False
            )
            future.add_done_callback(lambda _: news.put(None))
            _wait(cluster, future, news, regularizer.timeout_s)
            return returned(future.result())
        except ObjectiveError:
            raise
        except (Exception, CancelledError) as error:
            raise ExecutionError(
                f"its worker of the Dask cluster did not finish it ({first_line(error)}): look for a crash of what it "
                "calls, for too little memory, or for a package that the workers lack"
            ) from error
        finally:
            del cluster.news[key]

    def close(self) -> None:
        """Let go of the cluster."""
        DASK.leave(self)


def answer_task(topic: str, key: str, module: str, name: str, doing: str, body: bytes) -> bytes:
    """The task: whether the call succeeded, and what it returned or why it failed."""
    from distributed import get_worker  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    try:
        term = load_term(module, name)
        fields, arguments = pickle.loads(body)
    except ObjectiveError as error:
        return encode((False, str(error)))
    worker = get_worker()
    worker.log_event(topic, {"key": key, "worker": worker.address})
    return respond(term, doing, fields, arguments, encode)


async def kill_worker(dask_worker: Any) -> None:
    """What its nanny does; `dask_worker` is the nanny, as `Client.run` calls it."""
    await dask_worker.kill(timeout=_LEAVE_S, reason="tinker-flows: a term took too long")


def _wait(cluster: DaskCluster, future: Any, news: News, timeout_s: float | None) -> None:
    """Until a task is done; its limit runs from where a worker begins with it."""
    worker, limit_s = None, START_S
    while True:
        try:
            heard = news.get(timeout=limit_s)
        except queue.Empty:
            break
        if heard is None:
            return
        worker, limit_s = heard, timeout_s
    future.cancel()
    if worker is None:
        raise ExecutionError(
            f"no worker of the Dask cluster began with it within {START_S:g} s: give the cluster more workers"
        )
    try:
        cluster.replace(worker)
    except ExecutionError as error:
        raise ExecutionError(f"it took longer than its timeout_s of {timeout_s:g} s and {error}") from error
    raise ExecutionError(too_late(timeout_s))


def _open() -> DaskCluster:
    distributed = library("dask")
    import dask.config  # pyright: ignore[reportMissingImports]

    address, security, local = dask.config.get("scheduler-address", None), None, None
    if address is None:
        local = LocalDask()
        address, security = local.address, local.security
    try:
        client = distributed.Client(address, security=security, set_as_default=False, name=f"terms-{os.getpid()}")
    except Exception as error:
        if local is not None:
            local.close()
        raise ExecutionError(f"the Dask scheduler at {address} cannot be reached ({first_line(error)})") from error
    cluster = DaskCluster(client, local)
    client.subscribe_topic(cluster.topic, cluster.hear)
    return cluster


DASK = Shared(_open, DaskCluster.works, DaskCluster.close)

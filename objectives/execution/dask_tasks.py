"""Calls of terms as tasks of a Dask cluster: the configured cluster, or a local one for the run."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import torch

from objectives.errors import ExecutionError, ObjectiveError
from objectives.execution.cluster import Shared, decode_result, encode_call, first_line, library, too_late
from objectives.execution.messages import encode, receive
from objectives.execution.process import START_S, importable, start_python
from objectives.execution.respond import load_term, respond
from objectives.term import Regularizer, Term

# Seconds in which a worker can end by itself; meanwhile the scheduler could send it other tasks.
_LEAVE_S = 0.1
_STOP_S = 20.0

# Address of the worker that started a task; None after the task has ended.
News = queue.SimpleQueue[str | None]


class DaskFuture(Protocol):
    """Part of `distributed.Future`."""

    def cancel(self) -> object: ...


class Nanny(Protocol):
    """Part of `distributed.Nanny`, the parent process of a worker."""

    async def kill(self, timeout: float, reason: str) -> None: ...


class LocalDask:
    """Local cluster in a process that ends with this one.

    Attributes:
        address: address of the scheduler.
        security: keys that are required to connect.
    """

    def __init__(self) -> None:
        self._process, self._connection = start_python("objectives.execution.local_dask")
        try:
            if not self._connection.poll(START_S):
                raise ExecutionError(f"the local Dask cluster took longer than {START_S:g} s to start")
            self.address, self.security = receive(self._connection)
        except (EOFError, OSError) as error:
            self.close()
            raise ExecutionError("the local Dask cluster ended during startup; see its error output") from error
        except ExecutionError:
            self.close()
            raise

    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the cluster and its workers."""
        self._connection.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class DaskCluster:
    """Client with the events of its tasks; `local` is set if the cluster was started for it."""

    client: Any  # a `distributed.Client`; the library is optional
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
        """Handle the event of a worker that starts a task."""
        message = event[1]
        if (news := self.news.get(message["key"])) is not None:
            news.put(message["worker"])

    def replace(self, worker: str) -> None:
        """Kill a worker; its nanny starts a new one.

        Raises:
            ExecutionError: the worker has no nanny.
        """
        known = self.client.scheduler_info()["workers"].get(worker)
        if known is None:  # The worker has ended.
            return
        if known["nanny"] is None:
            raise ExecutionError(
                f"continues in the worker {worker}, which has no nanny to kill it; start workers with a nanny"
            )
        self.client.run(kill_worker, workers=[worker], nanny=True, on_error="ignore")


class TermTasks:
    """Caller of one term on any free worker; a worker that exceeds the time limit is killed and restarted."""

    def __init__(self, term: Term) -> None:
        self._term = importable(term)

    def call(self, doing: str, regularizer: Regularizer, *arguments: object) -> object:
        """Call the function `objectives.execution.respond.FUNCTIONS[doing]` on a worker.

        Raises:
            ObjectiveError: the function raised.
            ExecutionError: the call exceeded the term's time limit, its worker died, no worker is free or can import
                the term, or an argument cannot be pickled.
        """
        body = encode_call(regularizer, arguments)
        cluster = DASK.use(self)
        key = f"term-{regularizer.name}-{doing}-{uuid4().hex}"
        news = cluster.news[key] = queue.SimpleQueue()
        try:
            future = cluster.client.submit(
                answer_task, cluster.topic, key, *self._term, doing, body, key=key, pure=False
            )
            future.add_done_callback(lambda _: news.put(None))
            _wait(cluster, future, news, regularizer.timeout_s)
            return decode_result(future.result())
        except ObjectiveError:
            raise
        except (Exception, CancelledError) as error:
            raise ExecutionError(
                f"its worker of the Dask cluster did not finish it ({first_line(error)}); check for a crash in its "
                "dependencies, too little memory, or a package missing on the workers"
            ) from error
        finally:
            del cluster.news[key]

    def close(self) -> None:
        """Release the cluster."""
        DASK.leave(self)


def answer_task(topic: str, key: str, module: str, name: str, doing: str, body: bytes) -> bytes:
    """Run a call as a task; return an encoded pair of success and result or error message."""
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


async def kill_worker(dask_worker: Nanny) -> None:
    """Kill a worker from its nanny; `Client.run` passes the nanny as `dask_worker`."""
    await dask_worker.kill(timeout=_LEAVE_S, reason="tinker-flows: a term took too long")


def _wait(cluster: DaskCluster, future: DaskFuture, news: News, timeout_s: float | None) -> None:
    """Wait until a task is done; the time limit starts when a worker starts the task."""
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
            f"no worker of the Dask cluster started it within {START_S:g} s; add workers to the cluster"
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

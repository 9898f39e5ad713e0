"""Cancel in the UI while requests to the Prefect server fail."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from threading import Event
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from chaos.proxy import Proxies, Proxy
from chaos.schedule import Fault
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import Pause, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Cancelling, Suspended
from waiting import wait_for

from blocks.servers.processes import free_port
from flows.monitoring import interrupts
from flows.monitoring.drain import deliver_events
from flows.monitoring.interrupts import RunCancelled, deferred_interrupts
from tasks.common.internals.prefect import deferred_suspension
from tasks.common.task import step_task


@contextmanager
def handler_of_sigint(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_signal_stays_ignored() -> None:
    """A shell script starts its background jobs so, and Ctrl-C is meant for the job in the foreground."""
    with handler_of_sigint(signal.SIG_IGN), deferred_interrupts() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.requested
        stop.raise_if_requested()


def test_run_ends_although_a_handler_of_the_program_returns() -> None:
    handled: list[int] = []
    with handler_of_sigint(lambda number, _: handled.append(number)), deferred_interrupts() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            stop.raise_if_requested()
    assert handled == [signal.SIGINT]


@pytest.mark.parametrize(("cancels", "error"), [(True, RunCancelled), (False, TerminationSignal)], ids=str)
def test_sigterm_of_a_worker_ends_a_cancelled_run_as_cancelled(
    prefect_server: str, cancels: bool, error: type[BaseException]
) -> None:
    """A worker sends SIGTERM for a cancel of the flow run, which may be the caller of the run that trains."""
    raised: list[type[BaseException]] = []

    @flow(name="stage")
    def stage(caller: str) -> None:
        with deferred_interrupts() as stop:
            if cancels:
                with get_client(sync_client=True) as client:
                    client.set_flow_run_state(UUID(caller), Cancelling())
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(error):
                stop.raise_if_requested()
            raised.append(error)

    @flow(name="calls-a-stage")
    def calls_a_stage() -> None:
        stage(flow_run.get_id())

    calls_a_stage(return_state=True)
    assert raised == [error]


def test_a_suspended_run_finishes_its_step(prefect_server: str) -> None:
    """Prefect would raise Pause from the next task, in the middle of a step."""
    steps: list[int] = []

    @step_task(name="of-a-step")
    def of_a_step(number: int) -> None:
        steps.append(number)

    @flow(name="suspended")
    def suspended() -> None:
        with deferred_suspension():
            in_loop(copy_context())

    def in_loop(of_a_thread: Context) -> None:
        """Threads that were started before the loop have a copy of the context at that time."""
        with deferred_interrupts() as stop:
            of_a_step(0)
            assert not stop.requested
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(flow_run.get_id()), Suspended(timeout_seconds=60), force=True)
            wait_for(lambda: stop.requested, "the request to stop")
            of_a_step(1)
            of_a_step.submit(2).result()
            of_a_thread.run(of_a_step, 3)
            stop.raise_if_requested()

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(suspended), "suspended")
        run = client.create_flow_run_from_deployment(deployment)
        with pytest.raises(Pause):
            run_flow(suspended, flow_run=run)
        state = client.read_flow_run(run.id).state
    assert steps == [0, 1, 2, 3]
    assert state
    assert state.name == "Suspended"


@pytest.mark.parametrize("action", ["garbage", pytest.param("500 after", marks=pytest.mark.slow)])
def test_cancel_is_noticed_after_a_failed_request(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(interrupts, "POLL_EVERY_S", 0.1)
    proxy = Proxy(free_port(), urlsplit(prefect_server).port or 0)

    noticed: list[bool] = []

    @flow(name="cancelled")
    def cancelled() -> None:
        run_id = flow_run.get_id()
        with deferred_interrupts() as stop:
            armed = proxy.arm(Fault(0, 0.0, "prefect", action, 0, 0.0), f"/api/flow_runs/{run_id}")
            wait_for(lambda: armed.hit, "the failed request")
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(run_id, Cancelling())
            wait_for(lambda: stop.requested, "the request to stop")
            noticed.append(stop.requested)
            with pytest.raises(RunCancelled):
                stop.raise_if_requested()

    through_proxy = {PREFECT_API_URL: f"http://127.0.0.1:{proxy.port}/api", PREFECT_LOGGING_TO_API_ENABLED: False}
    with Proxies({"prefect": proxy}), temporary_settings(through_proxy):
        cancelled(return_state=True)
        deliver_events()  # before the proxy closes
    assert noticed


def test_cancel_of_the_calling_flow_is_noticed(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "POLL_EVERY_S", 0.1)
    noticed: list[bool] = []

    @flow(name="stage")
    def stage(caller: str) -> None:
        with deferred_interrupts() as stop, get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(caller), Cancelling())
            wait_for(lambda: stop.requested, "the request to stop")
            noticed.append(stop.requested)

    @flow(name="calls-a-stage")
    def calls_a_stage() -> None:
        stage(flow_run.get_id())

    calls_a_stage(return_state=True)
    assert noticed


def test_cancel_during_a_poll_is_kept(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step callback cancels the run while the poll waits for a response, which reports no cancel."""
    monkeypatch.setattr(interrupts, "POLL_EVERY_S", 0.01)
    read = SyncPrefectClient.read_flow_run
    requested: list[bool] = []

    @flow(name="pruned")
    def pruned() -> None:
        has_polled = Event()
        with deferred_interrupts() as stop:

            def cancel_and_read(*args: Any, **options: Any) -> Any:
                state = read(*args, **options)
                stop.cancel("Pruned.")
                has_polled.set()
                return state

            monkeypatch.setattr(SyncPrefectClient, "read_flow_run", cancel_and_read)
            assert has_polled.wait(20)
        monkeypatch.setattr(SyncPrefectClient, "read_flow_run", read)
        requested.append(stop.requested)

    pruned()
    assert requested == [True]

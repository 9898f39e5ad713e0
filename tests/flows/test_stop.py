"""A cancel in the UI, through a Prefect server that is not always there."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from chaos.proxy import Proxies, Proxy
from chaos.schedule import Fault
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Cancelling

from blocks.processes import free_port
from flows import stop
from flows.recorded import deliver_events
from flows.stop import CancelledInTheUI, listening_for_stop


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert happened()


@pytest.mark.parametrize("action", ["garbage", "500 after"])
def test_a_cancel_is_noticed_after_an_answer_that_is_none(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(stop, "LOOK_EVERY_S", 0.1)
    proxy = Proxy(free_port(), urlsplit(prefect_server).port or 0)

    noticed: list[bool] = []

    @flow(name="cancelled")
    def cancelled() -> None:
        run_id = flow_run.get_id()
        with listening_for_stop() as asked:
            armed = proxy.arm(Fault(0, 0.0, "prefect", action, 0, 0.0), f"/api/flow_runs/{run_id}")
            wait_for(lambda: armed.hit)
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(run_id, Cancelling())
            wait_for(lambda: asked.asked)
            noticed.append(asked.asked)
            with pytest.raises(CancelledInTheUI):
                asked.obey()

    behind = {PREFECT_API_URL: f"http://127.0.0.1:{proxy.port}/api", PREFECT_LOGGING_TO_API_ENABLED: False}
    with Proxies({"prefect": proxy}), temporary_settings(behind):
        cancelled(return_state=True)
        deliver_events()  # while there is a proxy to send them to
    assert noticed

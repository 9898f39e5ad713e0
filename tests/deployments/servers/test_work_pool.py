"""Work pool requests to a busy or failing Prefect server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType

from blocks.errors import ServiceError
from deployments.servers import work_pool


@contextmanager
def serving(*responses: tuple[int, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Run a server with these responses in order; yields its URL and the received requests."""
    pending, requests = list(responses), []

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append(f"{self.command} {self.path}")
            status, body = pending.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = respond

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def test_requests_to_a_busy_server_are_retried() -> None:
    with serving((503, b""), (409, b"{}"), (503, b""), (204, b"")) as (url, requests):
        work_pool.open_pool(work_pool.prefect_api(f"{url}/api", ""))
    assert requests == ["POST /api/work_pools/"] * 2 + ["PATCH /api/work_pools/tinker-flows"] * 2


@pytest.mark.parametrize("response", [(503, b""), (500, b""), (200, b"<html>")], ids=str)
def test_a_failing_server_is_named_in_the_error(response: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_pool, "BUSY_LIMIT_S", 0.0)
    with serving(response) as (url, _), pytest.raises(ServiceError, match=f"failed on POST {url}/api/work_pools/"):
        work_pool.open_pool(work_pool.prefect_api(f"{url}/api", ""))


def test_waiting_for_a_missing_pool_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_pool, "STARTUP_LIMIT_S", 0.0)
    with serving((404, b"{}")) as (url, _), pytest.raises(ServiceError, match="had no work pool 'tinker-flows'"):
        work_pool.wait_for_pool(work_pool.prefect_api(f"{url}/api", ""))


def test_orphaned_runs_no_longer_occupy_their_slots(prefect_server: str) -> None:
    """The server rejects every end but Cancelled of a run that is being cancelled."""
    api = work_pool.prefect_api(prefect_server, "")
    work_pool.open_pool(api)
    ends = {"RUNNING": "CRASHED", "PENDING": "CRASHED", "CANCELLING": "CANCELLED", "COMPLETED": "COMPLETED"}
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(flow(name="orphaned")(lambda: None))
        deployment = client.create_deployment(flow_id, "orphaned", work_pool_name=work_pool.POOL)
        runs = {state: client.create_flow_run_from_deployment(deployment).id for state in ends}
        for state, run in runs.items():
            client.update_flow_run(run, infrastructure_pid="1")  # otherwise, the server ends a cancel by itself
            client.set_flow_run_state(run, State(type=StateType(state)), force=True)
        work_pool.end_orphaned_runs(api)
        assert {state: client.read_flow_run(run).state_type for state, run in runs.items()} == ends


def test_an_orphaned_run_that_cannot_be_ended_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    orphans = b'[{"id": "1", "name": "long", "state_type": "RUNNING"}]'
    answer = b'{"status": "ABORT", "details": {"reason": "no such rule"}}'
    with serving((200, orphans), (200, answer)) as (url, _):
        work_pool.end_orphaned_runs(work_pool.prefect_api(url, ""))
    assert "The flow run 'long' of an earlier worker is not set to Crashed (no such rule)" in capsys.readouterr().err

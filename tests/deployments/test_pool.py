"""The work pool on a Prefect server that is busy, or that is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from blocks.errors import ServiceError
from deployments import pool


@contextmanager
def serving(*answers: tuple[int, bytes]) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers one after the other, and what it was asked."""
    left, asked = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(f"{self.command} {self.path}")
            status, body = left.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_busy_server_is_asked_again() -> None:
    with serving((503, b""), (409, b"{}"), (503, b""), (204, b"")) as (url, asked):
        pool.make_pool(url)
    assert asked == ["POST /api/work_pools/"] * 2 + ["PATCH /api/work_pools/tinker-flows"] * 2


@pytest.mark.parametrize("answer", [(503, b""), (500, b""), (200, b"<html>")], ids=str)
def test_a_server_that_does_not_do_it_is_named(answer: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BUSY_S", 0.0)
    with serving(answer) as (url, _), pytest.raises(ServiceError, match=f"did not do POST {url}/api/work_pools/"):
        pool.make_pool(url)


def test_a_pool_that_does_not_come_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LIMIT_S", 0.0)
    with serving((404, b"{}")) as (url, _), pytest.raises(ServiceError, match="had no work pool 'tinker-flows'"):
        pool.wait_for_pool(url)

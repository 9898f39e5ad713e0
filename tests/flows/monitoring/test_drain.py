"""Exit of a process whose Prefect server is down, or accepts requests and never responds."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

DOWN = "port = free_port()"
SILENT = "listening = socket.create_server(('127.0.0.1', 0)); port = listening.getsockname()[1]"


@pytest.mark.parametrize("server", [DOWN, SILENT], ids=["down", "silent"])
def test_process_exits_although_the_server_does_not_respond(tmp_path: Path, server: str) -> None:
    program = f"""
        import socket

        from prefect.events import emit_event
        from prefect.settings import PREFECT_API_URL, temporary_settings

        from blocks.servers.processes import free_port
        from flows.monitoring.drain import deliver_events

        {server}
        with temporary_settings({{PREFECT_API_URL: f"http://127.0.0.1:{{port}}/api"}}):
            for number in range(100):
                emit_event("step", resource={{"prefect.resource.id": f"step.{{number}}"}})
            deliver_events(limit_s=0.1)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PREFECT_HOME": str(tmp_path), "PATH": ""},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "did not accept 100 events" in process.stderr


@pytest.mark.parametrize(
    ("status", "num_failures", "pause_s", "num_attempts", "num_lost"),
    [(500, 1, 0.1, 2, 0), (500, 9, 0.1, 4, 2), (422, 9, 0.1, 1, 2), (500, 9, 60.0, 1, 2)],
    ids=["one error", "errors", "rejected", "out of time"],
)
def test_log_lines_are_sent_again(
    tmp_path: Path, status: int, num_failures: int, pause_s: float, num_attempts: int, num_lost: int
) -> None:
    """The server answers the first requests with an error; one that rejects the lines would do so again."""
    program = f"""
        import json, threading
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        from prefect.logging.handlers import emit_api_log
        from prefect.settings import PREFECT_API_URL, temporary_settings

        from flows.monitoring.drain import deliver_events
        from flows.runs.cli import silence_console_logs
        from tasks.common.internals import prefect

        class Server(BaseHTTPRequestHandler):
            attempts = []

            def do_GET(self):  # a token that older servers do not have
                self.respond(404)

            def do_POST(self):
                lines = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.attempts.append([line["message"] for line in lines])
                self.respond({status} if len(self.attempts) <= {num_failures} else 201)

            def respond(self, status):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prefect._LOG_PAUSES_S = ({pause_s}, 0.1, 0.1, 0.0)
        silence_console_logs()
        with temporary_settings({{PREFECT_API_URL: f"http://127.0.0.1:{{server.server_port}}/api"}}):
            line = {{"name": "prefect.flow_runs", "level": 20, "timestamp": "2026-01-01T00:00:00Z"}}
            for message in ("first", "second"):
                emit_api_log(line | {{"message": message}})
            deliver_events(limit_s=5)
        print(json.dumps(Server.attempts))
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PREFECT_HOME": str(tmp_path), "PATH": "", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false"},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(process.stdout) == [["first", "second"]] * num_attempts
    lost = f"The Prefect server did not accept {num_lost} events and log lines of this run: its UI lacks them.\n"
    assert process.stderr == (lost if num_lost else "")

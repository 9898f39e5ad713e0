"""Exit of a process whose Prefect server is down, or accepts requests and never responds."""

from __future__ import annotations

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

"""A run's process ends although the Prefect server went before it, or takes what it is sent and never answers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GONE = "port = free_port()"
SILENT = "listening = socket.create_server(('127.0.0.1', 0)); port = listening.getsockname()[1]"


@pytest.mark.parametrize("server", [GONE, SILENT], ids=["gone", "silent"])
def test_process_ends_although_the_server_does_not_answer(tmp_path: Path, server: str) -> None:
    program = f"""
        import socket

        from prefect.events import emit_event
        from prefect.settings import PREFECT_API_URL, temporary_settings

        from blocks.processes import free_port
        from flows.recorded import deliver_events

        {server}
        with temporary_settings({{PREFECT_API_URL: f"http://127.0.0.1:{{port}}/api"}}):
            for number in range(100):
                emit_event("step", resource={{"prefect.resource.id": f"step.{{number}}"}})
            deliver_events(limit_s=0.1)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PREFECT_HOME": str(tmp_path), "PATH": ""},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "did not take 100 events" in ended.stderr

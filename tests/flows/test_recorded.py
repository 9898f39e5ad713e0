"""A run's process ends although the Prefect server went before it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def test_process_ends_although_the_server_is_gone(tmp_path: Path) -> None:
    program = """
        from prefect.events import emit_event
        from prefect.settings import PREFECT_API_URL, temporary_settings

        from blocks.processes import free_port
        from flows.recorded import deliver_events

        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
            for number in range(100):
                emit_event("step", resource={"prefect.resource.id": f"step.{number}"})
            deliver_events(limit_s=0.1)
    """
    # Left alone, Prefect tries each event for eight seconds before it lets the process end.
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PREFECT_HOME": str(tmp_path), "PATH": ""},
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "did not take" in ended.stderr

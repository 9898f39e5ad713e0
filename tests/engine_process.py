"""A real engine in a process of its own, for any test: ``with running_engine(folder) as engine: engine.url``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

API_KEY = "tml-test"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A started engine.

    Attributes:
        url: the `base_url` for the SDK.
        state: its state folder; a second engine on it serves the same checkpoints.
        process: the process; its standard input is open and its end stops the engine.
        log: what it wrote to standard error.
    """

    url: str
    state: Path
    process: subprocess.Popen[str]
    log: Path


def start_engine(
    folder: Path,
    models: Sequence[str] = ("tiny",),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start an engine with its state in ``folder/state`` on a free port, and do not wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for model in models for part in ("--model", model)]
    state = ["--state", str(folder / "state"), "--port", "0", "--threads", "1", "--exit-with-stdin"]
    with (folder / "engine.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "engine", *state, *chosen, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TINKER_FLOWS_HOME": str(folder.parent / "engine-home"), **(environment or {})},
        )


@contextmanager
def running_engine(
    folder: Path,
    models: Sequence[str] = ("tiny",),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[EngineProcess]:
    """An engine that answers; when the block is left it is stopped and must end well, or have been killed with -9.

    Args:
        folder: for its state and log; give the same one again for a restart on the same state.
        arguments: more of the command line.
        environment: more variables; ``{"TINKER_ENGINE_API_KEY": "tml-..."}`` makes it ask for a key.
    """
    process = start_engine(folder, models, arguments, environment)
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        log = folder / "engine.log"
        assert url, f"the engine did not start: {log.read_text()}"
        try:
            yield EngineProcess(url, folder / "state", process, log)
        finally:
            process.stdin.close()
            status = process.wait(timeout=30)
    assert status in (0, -signal.SIGKILL), log.read_text()

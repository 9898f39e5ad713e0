"""Real engine processes for tests: ``with running_engine(folder) as engine: engine.url``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

API_KEY = "tml-test"
DEVICE = os.environ.get("TEST_ENGINE_DEVICE", "cpu")  # of engines that do not ask for another one


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Running engine process.

    Attributes:
        url: the `base_url` for the SDK.
        state: the state folder; a second engine on it serves the same checkpoints.
        process: the process; closing its standard input stops the engine.
        log: file with its standard error.
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
    """Start an engine on a free port with its state in ``folder/state``, without waiting for it."""
    folder.mkdir(parents=True, exist_ok=True)
    model_options = [part for model in models for part in ("--model", model)]
    state = ["--state", str(folder / "state"), "--port", "0", "--threads", "1", "--exit-with-stdin"]
    # Samples are deterministic on a CPU only.
    device = [] if {"--device", "--deterministic"} & set(arguments) else ["--device", DEVICE]
    with (folder / "engine.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "engine", *state, *model_options, *device, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TINKER_FLOWS_HOME": str(folder.parent / "engine-home"), **(environment or {})},
        )


def engine_tokens(url: str) -> dict[str, float]:
    """Return the tokens that an engine has counted so far, by use."""
    lines = re.findall(r'tinker_engine_tokens_total\{use="(\w+)"\} (\S+)', httpx.get(f"{url}/metrics").text)
    return {use: float(value) for use, value in lines}


@contextmanager
def running_engine(
    folder: Path,
    models: Sequence[str] = ("tiny",),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[EngineProcess]:
    """Run an engine during the block. After the block it must exit with status 0, or have been killed by SIGKILL.

    Args:
        folder: folder for state and log; reuse it to restart an engine on the same state.
        arguments: further command-line arguments.
        environment: further variables; ``{"TINKER_ENGINE_API_KEY": "tml-..."}`` requires this API key.
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
            status = process.wait(timeout=180)
    assert status in (0, -signal.SIGKILL), log.read_text()

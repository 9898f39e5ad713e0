"""Sandbox for model-written code: limits on time, memory, processes and files, and no network.

Each program runs in a process with its own Linux namespaces (`tasks.sandbox.child`): a read-only file system with
Python, a small temporary `/tmp`, no network, no view of other processes, and none of the run's environment variables.
This prevents harm to the machine. It does not make grades cheat-proof, because tests run in the same interpreter as the
tested code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from blocks.errors import ConfigError
from objectives.config.import_policy import is_restricted

OUTPUT_BYTES = 64 * 1024
# Exit status of the child if it could not isolate itself; the program is then not started.
REFUSED = 86
_CHILD = Path(__file__).with_name("child.py")
_GRACE_S = 5.0
_WITHOUT_ISOLATION = "; or set network: allow to run code with access to the network and to this user's files"
# Field, type, smallest and largest value of each limit. Below the smallest value, Python may not start, and each reward
# would be 0.
_RANGES = (
    ("seconds", (int, float), 0.1, 86_400),
    ("memory_mb", int, 32, 2**20),
    ("file_mb", int, 1, 2**20),
    ("processes", int, 1, 2**15),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program.

    Attributes:
        seconds: wall-clock time and processor time.
        memory_mb: address space of each process, and total size of all files; the files have no limit with
            `network: allow`.
        file_mb: size of one file, including the printed output.
        processes: number of concurrent processes and threads; no limit with `network: allow`.
        network: `none`, or `allow` to run the program without namespaces, with access to the network and to the files
            of this user. Use `allow` only for trusted code on kernels that refuse namespaces.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 8
    network: Literal["none", "allow"] = "none"

    def __post_init__(self) -> None:
        """Check the range of each limit, and that the config may run code without isolation.

        Raises:
            ConfigError: a limit is out of its range, or the config of a deployment's run sets `network: allow`.
        """
        for name, kind, least, most in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
                number = "an integer" if kind is int else "a number"
                raise ConfigError(f"limits.{name} is {str(value)[:50]}: set it to {number} from {least} to {most}.")
        if self.network == "allow" and is_restricted():
            raise ConfigError(
                "network: allow runs code without isolation, which the config of a deployment's run may not: remove it."
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        exit_code: exit status, or the negative signal number.
        timed_out: True if the program reached the time limit.
        output: standard output and standard error, truncated to `OUTPUT_BYTES`.
        seconds: wall-clock time.
    """

    exit_code: int
    timed_out: bool
    output: str
    seconds: float


def run_program(program: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program in the sandbox and wait until it and all of its children have ended.

    Raises:
        ConfigError: the machine refuses to isolate the program or to set its limits.
    """
    # Resolve links to the interpreter's folder, because the sandbox mounts it under its real path.
    python = Path(sys.executable).parent.resolve() / Path(sys.executable).name
    with tempfile.TemporaryDirectory(prefix="tinker-flows-sandbox-") as folder, tempfile.TemporaryFile() as output:
        command = [str(python), "-I", "-S", str(_CHILD), json.dumps({**asdict(limits), "folder": folder})]
        started = time.monotonic()
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=folder, env={}, start_new_session=True
        ) as process:
            timed_out = _feed(process, program, limits.seconds)
        text = _read(output)
    if process.returncode == REFUSED:
        if limits.network == "allow":
            raise ConfigError(f"Code cannot be run on this machine, because {text.strip()}.")
        way_out = "" if is_restricted() else _WITHOUT_ISOLATION
        raise ConfigError(f"Code cannot be isolated on this machine, because {text.strip()}{way_out}.")
    return Outcome(process.returncode, timed_out, text, time.monotonic() - started)


def _feed(process: subprocess.Popen[bytes], program: str, seconds: float) -> bool:
    """Send the program to its process and wait for its end; return True if it timed out."""
    try:
        process.communicate(program.encode("utf-8", "surrogatepass"), timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        with suppress(subprocess.TimeoutExpired):
            process.terminate()  # ends the namespace and waits for its end
            process.wait(_GRACE_S)
        return True
    finally:
        # Without a namespace, kill the process group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_GRACE_S)


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read(OUTPUT_BYTES).decode(errors="replace")

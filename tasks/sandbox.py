"""Code that a model wrote, run apart: limits on time, memory, processes and files, no network, nothing of this machine.

Each program is a process of its own in Linux namespaces (`tasks.sandbox_child`): a file system of its own with Python,
read-only, and a small writable `/tmp` that goes with it; no network, no sight of other processes, an empty environment.
That keeps a bad program from doing harm. It does not make a grade proof against a program written to cheat: what
checks a function runs in the same interpreter as the function.
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

OUTPUT_BYTES = 64 * 1024
# What the child exits with where it could not set the limits; no program is started then.
REFUSED = 86
_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall-clock time, and of processor time.
        memory_mb: address space of each process; and all files together.
        file_mb: of one file, what it prints being one.
        processes: that are there at once, threads included.
        network: `none`, or `allow`, which runs the program without namespaces: with the network, and the files that
            this user can read and write. For kernels that refuse namespaces, where the code is trusted.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 8
    network: Literal["none", "allow"] = "none"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        exit_code: its own; minus the signal's number where one ended it.
        timed_out: it was ended because its time was up.
        output: what it printed, on both streams, as far as the limit goes.
        seconds: it took.
    """

    exit_code: int
    timed_out: bool
    output: str
    seconds: float


def run_program(program: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program apart from everything; returns when it, and whatever it started, has ended.

    Raises:
        ConfigError: the kernel refuses what keeps the program apart.
    """
    # By the name that its folder is mounted under in there, where a link leads to it.
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
        raise ConfigError(
            f"Code cannot be kept apart here ({text.strip()}): let this user make namespaces (by a container's seccomp "
            "profile, on Ubuntu by kernel.apparmor_restrict_unprivileged_userns=0), or set network: allow, to run it "
            "with the network and with this user's files."
        )
    return Outcome(process.returncode, timed_out, text, time.monotonic() - started)


def _feed(process: subprocess.Popen[bytes], program: str, seconds: float) -> bool:
    """Hand over the program and wait for its end; true where its time was up."""
    try:
        process.communicate(program.encode("utf-8", "surrogatepass"), timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        # Its end takes the processes of its namespace with it; without one, those that stayed in its group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_GRACE_S)


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read(OUTPUT_BYTES).decode(errors="replace")

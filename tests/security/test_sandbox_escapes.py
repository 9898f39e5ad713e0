"""Escapes from the sandbox of model-written code, one test each: none may succeed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tasks.sandbox.runner import Limits, Outcome, run_program

pytestmark = pytest.mark.process

# Names of a program's process, so that it can be found from outside.
NAMED = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print(name, "succeeded" if result >= 0 else os.strerror(ctypes.get_errno()), flush=True)
def survive():
    libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: do not end with the parent
    os.setsid()
    libc.prctl(15, b"{mark}", 0, 0, 0)  # PR_SET_NAME
"""
LINGER = "    print('lingers', flush=True)\n    time.sleep(120)\n"
# System call numbers of the two processors that the tests run on.
NUMBERS = {
    "x86_64": {
        "clone": 56,
        "clone3": 435,
        "add_key": 248,
        "keyctl": 250,
        "bpf": 321,
        "setsockopt": 54,
        "io_uring_setup": 425,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "add_key": 217,
        "keyctl": 219,
        "bpf": 280,
        "setsockopt": 208,
        "io_uring_setup": 425,
    },
}[os.uname().machine]
NEW_USER = 0x10000000


def attack(program: str, **limits: float) -> tuple[Outcome, str]:
    """Run a program; return its outcome and the name under which its survivors would be found."""
    mark = uuid.uuid4().hex[:15]
    return run_program(NAMED.replace("{mark}", mark) + program, Limits(**limits)), mark  # pyright: ignore[reportArgumentType]


def survivors(mark: str) -> list[str]:
    """Return the processes of a name, without those that the kernel is ending."""
    lines = subprocess.run(["ps", "-eo", "stat,comm"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line.endswith(mark) and not line.startswith("Z")]


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + 30
    while survivors(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert survivors(mark) == []


def refused(program: str, reason: str, **limits: float) -> None:
    outcome, _ = attack(program, **limits)
    assert "succeeded" not in outcome.output
    assert reason in outcome.output


# Processes


def test_a_program_that_outlives_its_parent_ends_at_the_time_limit() -> None:
    outcome, mark = attack("survive()\nif True:\n" + LINGER, seconds=3)
    assert outcome.timed_out
    assert outcome.output == "lingers\n"
    wait_until_gone(mark)


def test_a_daemon_ends_with_the_program() -> None:
    outcome, mark = attack(
        "if os.fork() == 0:\n    survive()\n    if os.fork():\n        os._exit(0)\n" + LINGER + "time.sleep(1)"
    )
    assert not outcome.timed_out
    assert outcome.output == "lingers\n"
    wait_until_gone(mark)


def test_a_program_that_kills_its_process_group_leaves_nothing_behind() -> None:
    killer = "time.sleep(1)\nos.killpg(0, signal.SIGKILL)"
    outcome, mark = attack("if os.fork() == 0:\n    survive()\n" + LINGER + killer, seconds=60)
    assert outcome.exit_code == -9
    assert not outcome.timed_out
    wait_until_gone(mark)


def test_signals_do_not_reach_the_first_process_or_others() -> None:
    outcome, mark = attack("os.kill(1, signal.SIGKILL)\nos.kill(1, signal.SIGTERM)\nprint('still here')")
    assert outcome.output == "still here\n"
    wait_until_gone(mark)
    outcome, _ = attack(f"os.kill({os.getpid()}, 0)\nprint('succeeded')")
    assert "ProcessLookupError" in outcome.output
    outcome, _ = attack("os.kill(-1, signal.SIGKILL)\nprint('succeeded')")
    assert "ProcessLookupError" in outcome.output  # there is none but itself


def test_the_runner_that_dies_takes_the_program_along(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex[:15]
    program = NAMED.replace("{mark}", mark) + "survive()\nif True:\n" + LINGER
    script = f"from tasks.sandbox.runner import Limits, run_program\nrun_program({program!r}, Limits(seconds=100))"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], start_new_session=True
    ) as runner:
        deadline = time.monotonic() + 60
        while not survivors(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert survivors(mark)
        # The group of the sandbox's outer process is that process alone.
        outer = subprocess.run(["pgrep", "-P", str(runner.pid)], capture_output=True, text=True, check=True).stdout
        os.killpg(int(outer.split()[0]), 9)
        wait_until_gone(mark)
        runner.kill()


def test_debugging_the_first_process_is_refused() -> None:
    refused("call('ptrace', 16, 1, 0, 0)", "ptrace Operation not permitted")  # PTRACE_ATTACH


def test_the_number_of_processes_is_limited() -> None:
    refused(
        "for _ in range(50):\n    if os.fork() == 0:\n        time.sleep(60)\nprint('succeeded')", "temporarily unavail"
    )


# Memory


def test_files_in_memory_are_refused() -> None:
    refused("call('memfd_create', b'a', 0)", "memfd_create Operation not permitted")


def test_shared_memory_of_system_v_is_refused() -> None:
    refused("call('shmget', 0, 120 << 20, 0o1600)", "shmget Operation not permitted", memory_mb=64)


def test_shared_memory_of_posix_is_refused() -> None:
    refused(
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=1)\nprint('succeeded')",
        "No such file or directory: '/psm",
    )


def test_anonymous_memory_is_limited() -> None:
    refused("import mmap\nmmap.mmap(-1, 600 << 20)\nprint('succeeded')", "Cannot allocate memory")


def test_files_on_disk_are_limited_together() -> None:
    refused(
        "for i in range(9):\n    open(f'{i}', 'wb').write(bytes(15_000_000))\nprint('succeeded')",
        "No space left",
        memory_mb=100,
    )


@pytest.mark.parametrize("option", ["SO_SNDBUF", "SO_RCVBUF", "SO_SNDBUFFORCE", "SO_RCVBUFFORCE"])
def test_buffers_of_sockets_cannot_be_enlarged(option: str) -> None:
    """Two processes with 30 pairs of sockets held 477 MB each."""
    start = "import socket\npair = socket.socketpair()\n"
    number = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}[option]
    refused(f"{start}pair[0].setsockopt(1, {number}, 1 << 30)\nprint('succeeded')", "PermissionError")
    value = "ctypes.byref(ctypes.c_int(1 << 30))"
    for level, name in ((1 | 1 << 40, number), (1, number | 1 << 40)):  # of which the kernel reads the lower half
        arguments = f"ctypes.c_long({level}), ctypes.c_long({name}), {value}, 4"
        refused(
            f"{start}call('syscall', {NUMBERS['setsockopt']}, pair[0].fileno(), {arguments})",
            "syscall Operation not permitted",
        )


def test_other_options_of_sockets_are_allowed() -> None:
    program = "import socket\nsocket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\nprint('allowed')"
    assert attack(program)[0].output == "allowed\n"


def test_connections_that_wait_cannot_hold_memory() -> None:
    """300 of them held 69 MB, and a socket may have 4,096."""
    refused(
        "import socket\nserver = socket.socket(socket.AF_UNIX)\nserver.bind('a')\nserver.listen(4096)\n"
        "print('succeeded')",
        "PermissionError",
    )


def test_buffers_of_sockets_are_small() -> None:
    program = """
import socket
pairs, size = [], 0
try:
    while True:
        pairs.append(socket.socketpair())
except OSError:
    pass
for end in (end for pair in pairs for end in pair):
    end.setblocking(False)
    try:
        while True:
            size += end.send(bytes(32768))
    except BlockingIOError:
        pass
print(len(pairs), size)
"""
    outcome, _ = attack(program, memory_mb=64)
    num_pairs, size = map(int, outcome.output.split())
    assert num_pairs > 20
    assert size < 20e6


# Namespaces and the kernel


def test_new_namespaces_are_refused() -> None:
    refused(f"call('unshare', {NEW_USER})", "unshare Operation not permitted")
    numbers = f"{NUMBERS['clone']}, {NEW_USER} | 17"
    refused(f"call('syscall', {numbers}, 0, 0, 0, 0)", "syscall Operation not permitted")
    structure = f"(ctypes.c_uint64 * 11)({NEW_USER}, 0, 0, 0, 17)"
    refused(f"call('syscall', {NUMBERS['clone3']}, ctypes.byref({structure}), 88)", "syscall Function not implemented")


def test_mounts_are_refused() -> None:
    refused("call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, b'size=3g')", "mount Operation not permitted")
    refused("call('chroot', b'/tmp')", "chroot Operation not permitted")


@pytest.mark.parametrize("name", ["add_key", "keyctl", "bpf", "io_uring_setup"])
def test_interfaces_of_the_kernel_are_refused(name: str) -> None:
    refused(f"call('syscall', {NUMBERS[name]}, 0, 0, 0, 0, 0)", "syscall Operation not permitted")


def test_privileges_cannot_be_gained() -> None:
    refused("os.setuid(0)\nprint('succeeded')", "Operation not permitted")


# Files


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/environ", "/sys", "/dev/null", "/home", "/var", __file__])
def test_files_of_the_machine_do_not_exist(path: str) -> None:
    refused(f"os.stat({path!r})\nprint('succeeded')", "FileNotFoundError")


def test_folders_above_the_interpreter_cannot_be_listed() -> None:
    above = {str(parent) for folder in (sys.prefix, sys.base_prefix) for parent in Path(folder).resolve().parents}
    for folder in sorted(above - {"/", "/usr", "/tmp"}):
        refused(f"os.listdir({folder!r})\nprint('succeeded')", "PermissionError")


def test_symbolic_links_lead_nowhere() -> None:
    refused("os.symlink('../../../etc/passwd', 'a')\nopen('a').read()\nprint('succeeded')", "FileNotFoundError")
    refused("os.symlink('/proc/1/root', 'a')\nos.listdir('a')\nprint('succeeded')", "FileNotFoundError")


def test_the_interpreter_cannot_be_changed() -> None:
    refused("open(os.__file__, 'a')\nprint('succeeded')", "Errno")  # of another user, or read-only
    refused("open('/note', 'w')\nprint('succeeded')", "Read-only file system")


# Network and environment


@pytest.mark.parametrize("family", ["AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_other_address_families_are_refused(family: str) -> None:
    program = f"import socket\nsocket.socket(socket.{family}, socket.SOCK_RAW)\nprint('succeeded')"
    refused(program, "Address family not supported")


def test_the_network_is_unreachable(tmp_path: Path) -> None:
    refused("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)\nprint('succeeded')", "unreachable")
    refused("import socket\nsocket.getaddrinfo('example.org', 80)\nprint('succeeded')", "gaierror")


def test_sockets_of_the_machine_cannot_be_reached_by_name() -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0{uuid.uuid4()}"
        server.bind(name)
        server.listen()
        refused(
            f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})\nprint('succeeded')", "ConnectionRefused"
        )


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    outcome, _ = attack("print(dict(os.environ), os.listdir('/proc') if os.path.exists('/proc') else None)")
    assert "tml" not in outcome.output
    assert outcome.output.rstrip().endswith("None")

"""Sandbox process: isolates itself, then runs the program from its standard input.

`tasks.sandbox.runner` starts this script with JSON settings as the only argument. The script uses only the standard
library.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

REFUSED = 86

# linux/sched.h
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEW_CGROUPS, NEW_NAMES = 0x2000000, 0x4000000
# sys/mount.h
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
# linux/prctl.h
DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38
# seccomp.h of libseccomp
ALLOW, FAIL = 0x7FFF0000, 0x50000
EQUAL, GREATER, MASKED_EQUAL = 4, 6, 7

# System calls for memory outside of the address space, for other namespaces and for the kernel's larger interfaces.
DENIED = (
    *("memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "semget", "semop", "semctl", "semtimedop"),
    *("msgget", "msgsnd", "msgrcv", "msgctl", "add_key", "request_key", "keyctl", "unshare", "setns", "chroot"),
    *("mount", "umount2", "pivot_root", "fsopen", "fsmount", "fsconfig", "open_tree", "move_mount", "mount_setattr"),
    "listen",  # the buffers of connections that wait to be accepted have no limit
    *("open_by_handle_at", "name_to_handle_at", "ptrace", "process_vm_readv", "process_vm_writev", "bpf"),
    *("perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
)
# asm-generic/socket.h: SOL_SOCKET; SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE
SOCKET_LEVEL, BUFFER_SIZES = 1, (7, 8, 32, 33)
LOW = 0xFFFFFFFF
UNIX, INTERNET, INTERNET_6 = 1, 2, 10  # the address families that a program may use in its own network

FIRST_USER = 40_000
_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """Isolation that this machine does not offer, with the fix."""


def main() -> None:
    """Isolate this process, run the program below it, and exit as the program did."""
    settings = json.loads(sys.argv[1])
    program_fd = _write_to_memory(sys.stdin.buffer.read())
    is_isolated = settings["network"] == "none"
    try:
        if is_isolated:
            seccomp = _load_seccomp()
            _isolate(settings)
            _set_limits(settings)
            _filter_system_calls(seccomp)
        else:
            _set_limits(settings)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(REFUSED)
    except OSError as error:
        print(f"the kernel or container refuses a part of the isolation ({error}): allow it", file=sys.stderr)
        sys.exit(REFUSED)
    code = _run_below_init(program_fd) if is_isolated else _run(program_fd)
    if code < 0:
        # Die of the same signal, so that the runner sees it.
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # The program must not be able to imitate a refusal.
    os._exit(1 if code == REFUSED else code)


def _write_to_memory(program: bytes) -> int:
    """Write a program to a file in memory; return its descriptor."""
    try:
        file = os.memfd_create("program")
    except AttributeError:
        print(f"the sandbox needs Linux, and this is {sys.platform}", file=sys.stderr)
        sys.exit(REFUSED)
    os.truncate(file, len(program))
    os.pwrite(file, program, 0)
    return file


def _run_below_init(program_fd: int) -> int:
    """Run the program below the first process of the PID namespace; return its exit status or negative signal number.

    When the first process of a PID namespace ends, the kernel ends all others. The first process can be relied on: it
    ends with this process, and signals from within the namespace do not reach it.
    """
    report_read, report_write = os.pipe()
    start_read, start_write = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(start_write)
        os.setsid()  # so that the program's process group does not include the outer process
        _prctl(DIE_WITH_PARENT, signal.SIGKILL)
        os.write(report_write, b"ready ")
        if os.read(start_read, 1):  # empty if the parent has ended
            os.write(report_write, str(_run(program_fd)).encode())
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGKILL))
    os.close(report_write)
    os.read(report_read, 16)
    os.write(start_write, b"1")
    result = os.read(report_read, 16)
    os.waitpid(init, 0)
    return int(result) if result else -signal.SIGKILL


def _run(program_fd: int) -> int:
    """Run the program in a child of this process; return its exit status or negative signal number."""
    child = os.fork()
    if child == 0:
        _prctl(DIE_WITH_PARENT, signal.SIGKILL)
        os.dup2(program_fd, 0)
        environment = {"PYTHONHASHSEED": "0", "HOME": "/tmp", "LANG": "C.UTF-8"}
        os.execve(sys.executable, [sys.executable, "-I", "-"], environment)
    while True:
        process, status = os.wait()  # the first process of a namespace inherits orphans
        if process == child:
            return os.waitstatus_to_exitcode(status)


def _load_seccomp() -> ctypes.CDLL:
    try:
        seccomp = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise Refused("the library libseccomp.so.2 is missing: install libseccomp") from error
    seccomp.seccomp_init.restype = ctypes.c_void_p
    return seccomp


def _filter_system_calls(seccomp: ctypes.CDLL) -> None:
    """Deny system calls that a program does not need, in this process and all that it starts."""
    rules = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(ALLOW)))

    def deny(name: str, reason: int = errno.EPERM, *comparisons: _Comparison) -> None:
        """Let a system call fail; with comparisons, only if its arguments match them."""
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        action = ctypes.c_uint32(FAIL | reason)
        if number < 0:
            return  # not on this processor, or newer than the library
        count = len(comparisons)
        if seccomp.seccomp_rule_add_array(rules, action, number, count, (_Comparison * count)(*comparisons)) != 0:
            raise Refused(f"libseccomp cannot filter {name}: update libseccomp")

    for name in DENIED:
        deny(name)
    deny("clone3", errno.ENOSYS)  # its flags are behind a pointer; the C library then calls clone
    for kind in (NEW_MOUNTS, NEW_CGROUPS, NEW_NAMES, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK):
        deny("clone", errno.EPERM, _Comparison(0, MASKED_EQUAL, kind, kind))
    for name in ("socket", "socketpair"):
        for family in range(INTERNET + 1, INTERNET_6):
            deny(name, errno.EAFNOSUPPORT, _Comparison(0, EQUAL, family))
        deny(name, errno.EAFNOSUPPORT, _Comparison(0, GREATER, INTERNET_6))
    for option in BUFFER_SIZES:  # the kernel reads the lower half of each argument
        level, size = _Comparison(1, MASKED_EQUAL, LOW, SOCKET_LEVEL), _Comparison(2, MASKED_EQUAL, LOW, option)
        deny("setsockopt", errno.EPERM, level, size)
    if seccomp.seccomp_load(rules) != 0:
        raise Refused("the kernel refuses filters of system calls: allow seccomp for this user or container")
    seccomp.seccomp_release(rules)


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def _isolate(settings: dict[str, Any]) -> None:
    """Enter new namespaces: no network, no other processes, and a file system with Python and an empty /tmp."""
    as_root = os.getuid() == 0
    uid, gid = os.getuid(), os.getgid()
    kinds = NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    try:
        _call("unshare", kinds if as_root else kinds | NEW_USER)
        if not as_root:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{FIRST_USER} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{FIRST_USER} {gid} 1")
    except OSError as error:
        raise Refused(
            f"the kernel refuses namespaces ({error}): allow this user to create them, in the container's seccomp "
            "profile, or on Ubuntu with kernel.apparmor_restrict_unprivileged_userns=0"
        ) from error
    try:
        _mount(None, "/", None, RECURSIVE | PRIVATE)
        _build_root(Path(settings["folder"]), settings["memory_mb"])
    except OSError as error:
        raise Refused(
            f"a file system of its own is refused ({error}): allow mounts in namespaces, in the container's AppArmor "
            "or SELinux profile"
        ) from error
    if as_root:
        # The process limit is per user and does not apply to root, so take an unused user ID.
        user = FIRST_USER + random.SystemRandom().randrange(20_000)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _prctl(NO_NEW_PRIVILEGES, 1)


def _build_root(root: Path, memory_mb: int) -> None:
    _mount("tmpfs", str(root), "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755")
    # Create /tmp first: one of Python's folders may be below it.
    (root / "tmp").mkdir()
    _mount("tmpfs", str(root / "tmp"), "tmpfs", NO_SUID | NO_DEV, f"size={memory_mb}m,nr_inodes=10k,mode=1777")
    for source in _python_folders():
        target = root / source.relative_to("/")
        target.mkdir(parents=True, exist_ok=True)
        for parent in target.relative_to(root).parents[:-1]:
            if parent != Path("tmp"):
                (root / parent).chmod(0o711)  # a program may pass through the folder but not list it
        _mount(str(source), str(target), None, BIND | RECURSIVE)
        for folder in _mounts_below(target):
            _mount(None, folder, None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV)
    for name in ("lib", "lib64", "bin"):
        link = Path("/", name)
        if link.is_symlink() and not (root / name).exists():
            (root / name).symlink_to(link.readlink())
    (root / "before").mkdir()
    os.chdir(root)
    _call("pivot_root", b".", b"before")
    os.chdir("/")
    _call("umount2", b"/before", DETACH)
    Path("/before").rmdir()
    _mount(None, "/", None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV)
    os.chdir("/tmp")


def _mounts_below(target: Path) -> list[str]:
    """Return the mount points at and below a folder, because a remount applies to a single mount point."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines}
    return sorted(point for point in points if Path(point) == target or target in Path(point).parents)


def _python_folders() -> list[Path]:
    """Folders of the interpreter and its packages, without folders nested in others."""
    executable = Path(sys.executable)
    folders = {Path(sys.prefix), Path(sys.base_prefix), executable.resolve().parent.parent, Path("/usr")}
    if (pyvenv := executable.parent.parent).joinpath("pyvenv.cfg").is_file():
        folders.add(pyvenv)
    folders |= {path for path in map(Path, ("/lib", "/lib64")) if path.is_dir() and not path.is_symlink()}
    folders = {path.resolve() for path in folders if path.is_dir()}
    return sorted(path for path in folders if not any(other in path.parents for other in folders))


def _set_limits(settings: dict[str, Any]) -> None:
    seconds, size = max(1, round(settings["seconds"])), settings["memory_mb"] << 20
    for kind, limit in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, settings["file_mb"] << 20),
    ):
        _set_limit(kind, limit)
    if settings["network"] == "none":
        # Two more for this process and for the first one of the namespace, which wait for the program.
        _set_limit(resource.RLIMIT_NPROC, settings["processes"] + 2)


def _set_limit(kind: int, limit: int) -> None:
    try:
        resource.setrlimit(kind, (limit, limit))
    except (OSError, ValueError) as error:
        raise Refused(f"the limit {limit} is above that of this user ({error}): lower `limits`") from error


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call("mount", _bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data))


def _bytes(text: str | None) -> bytes | None:
    return text.encode() if text is not None else None


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, value, 0, 0, 0)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()

"""Sandbox process: isolates itself, then runs the program from its standard input.

`tasks.sandbox.runner` starts this script with JSON settings as the only argument. The script uses only the standard
library.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

REFUSED = 86

# linux/sched.h
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
# sys/mount.h
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
# linux/prctl.h
DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38

NOBODY = 40_000
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Isolate this process, run the program in a child, and exit as the program did."""
    settings = json.loads(sys.argv[1])
    program = sys.stdin.buffer.read()
    try:
        if settings["network"] == "none":
            _isolate(settings)
        _set_limits(settings)
    except (OSError, AttributeError) as error:  # AttributeError on systems other than Linux
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    child = os.fork()
    if child == 0:
        _run(program)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # Die of the same signal, so that the runner sees it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # The program must not be able to imitate a refusal.
    os._exit(1 if code == REFUSED else code)


def _isolate(settings: dict[str, Any]) -> None:
    """Enter new namespaces: no network, no other processes, and a file system with Python and an empty /tmp."""
    as_root = os.getuid() == 0
    uid, gid = os.getuid(), os.getgid()
    kinds = NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    _call("unshare", kinds if as_root else kinds | NEW_USER)
    if not as_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _build_root(Path(settings["folder"]), settings["memory_mb"])
    if as_root:
        # The process limit is per user and does not apply to root, so take an unused user ID.
        user = NOBODY + random.SystemRandom().randrange(20_000)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _build_root(root: Path, memory_mb: int) -> None:
    _mount("tmpfs", str(root), "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755")
    # Create /tmp first: one of Python's folders may be below it.
    (root / "tmp").mkdir()
    _mount("tmpfs", str(root / "tmp"), "tmpfs", NO_SUID | NO_DEV, f"size={memory_mb}m,nr_inodes=10k,mode=1777")
    for source in _python_folders():
        target = root / source.relative_to("/")
        target.mkdir(parents=True, exist_ok=True)
        _mount(str(source), str(target), None, BIND | RECURSIVE)
        _mount(None, str(target), None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV)
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
        resource.setrlimit(kind, (limit, limit))
    if settings["network"] == "none":
        # One more for this process, which waits for the program.
        resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"] + 1, settings["processes"] + 1))


def _run(program: bytes) -> NoReturn:
    """Replace this process by an isolated interpreter that runs the program."""
    _call("prctl", DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    source = os.memfd_create("program")
    os.truncate(source, len(program))
    os.pwrite(source, program, 0)
    os.dup2(source, 0)
    os.execve(sys.executable, [sys.executable, "-I", "-"], {"PYTHONHASHSEED": "0", "HOME": "/tmp", "LANG": "C.UTF-8"})


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call("mount", _bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data))


def _bytes(text: str | None) -> bytes | None:
    return text.encode() if text is not None else None


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()

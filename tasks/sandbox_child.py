"""The process that a program of the sandbox becomes: it gives up everything, then runs what its standard input holds.

Started by `tasks.sandbox` with the settings as its only argument. Only the standard library, and none of this project.
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
    """Give up what the settings do not leave, then run the program; what started it waits for its end."""
    settings = json.loads(sys.argv[1])
    program = sys.stdin.buffer.read()
    try:
        if settings["network"] == "none":
            _leave(settings)
        _limit(settings)
    except (OSError, AttributeError) as error:  # the latter where the system is another than Linux
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    child = os.fork()
    if child == 0:
        _become(program)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # As the program ended, so that whoever waits sees it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # A status of the program's own is never taken for a refusal.
    os._exit(1 if code == REFUSED else code)


def _leave(settings: dict[str, Any]) -> None:
    """Namespaces of its own: no network, no other processes, and a file system with Python and an empty /tmp."""
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
        # The kernel counts no processes of root's; and another's are not to be counted with these.
        someone = NOBODY + random.SystemRandom().randrange(20_000)
        os.setgroups([])
        os.setresgid(someone, someone, someone)
        os.setresuid(someone, someone, someone)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _build_root(root: Path, memory_mb: int) -> None:
    _mount("tmpfs", str(root), "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755")
    # Before Python's folders, one of which may be below it.
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
    """What an interpreter and its packages are read from, the outer ones alone."""
    executable = Path(sys.executable)
    found = {Path(sys.prefix), Path(sys.base_prefix), executable.resolve().parent.parent, Path("/usr")}
    if (pyvenv := executable.parent.parent).joinpath("pyvenv.cfg").is_file():
        found.add(pyvenv)
    found |= {path for path in map(Path, ("/lib", "/lib64")) if path.is_dir() and not path.is_symlink()}
    found = {path.resolve() for path in found if path.is_dir()}
    return sorted(path for path in found if not any(other in path.parents for other in found))


def _limit(settings: dict[str, Any]) -> None:
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
        # And this process itself, which waits.
        resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"] + 1, settings["processes"] + 1))


def _become(program: bytes) -> NoReturn:
    """Run the program in an interpreter that knows only what it is given."""
    _call("prctl", DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    source = os.memfd_create("program")
    os.truncate(source, len(program))
    os.pwrite(source, program, 0)
    os.dup2(source, 0)
    os.execve(sys.executable, [sys.executable, "-I", "-"], {"PYTHONHASHSEED": "0", "HOME": "/tmp", "LANG": "C.UTF-8"})


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call("mount", *(_bytes(each) for each in (source, target, kind)), ctypes.c_ulong(flags), _bytes(data))


def _bytes(text: str | None) -> bytes | None:
    return text.encode() if text is not None else None


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()

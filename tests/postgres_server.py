"""Real PostgreSQL server from Debian's packages: ``with running_postgres() as address``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from blocks.servers.processes import free_port

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@contextmanager
def running_postgres() -> Iterator[str]:
    """Run a server on a new cluster; yields its address as `user@host:port`."""
    assert PROGRAMS, "PostgreSQL is not installed in /usr/lib/postgresql: install Debian's package postgresql."
    programs, port = PROGRAMS[-1], free_port()
    # PostgreSQL refuses to run as root, and other users cannot read pytest's folders.
    user = "postgres" if os.getuid() == 0 else None
    with TemporaryDirectory(prefix="tinker-flows-postgres-") as cluster:
        if user:
            shutil.chown(cluster, user)
        initialize = [programs / "initdb", "-D", cluster, "-U", "tester", "--auth=trust", "--no-sync"]
        subprocess.run(initialize, user=user, check=True, stdout=subprocess.DEVNULL, cwd=cluster)
        control = [programs / "pg_ctl", "-D", cluster, "-w"]
        settings = f"-c port={port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={cluster} -c fsync=off"
        start = [*control, "-l", f"{cluster}/log", "-o", settings, "start"]
        subprocess.run(start, user=user, check=True, stdout=subprocess.DEVNULL, cwd=cluster)
        try:
            yield f"tester@127.0.0.1:{port}"
        finally:
            stop = [*control, "-m", "immediate", "stop"]
            subprocess.run(stop, user=user, check=True, stdout=subprocess.DEVNULL, cwd=cluster)

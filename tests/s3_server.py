"""Real S3 server in a separate process: ``with running_s3(folder) as s3: s3.endpoint_url``."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError

import fsspec

# Below the range from which Linux takes the ports of outgoing connections (net.ipv4.ip_local_port_range, from 32,768):
# a connection of another process could otherwise take the port of a server that is down.
PORTS = range(20_000, 32_000)
ACCESS_KEY = "test-access"
SECRET_KEY = "test-secret"


@dataclass(slots=True)
class S3Server:
    """Running S3 server.

    Attributes:
        endpoint_url: URL of the S3 API.
        bucket: existing bucket.
        folder: folder of the objects and the log.
        ports: ports of the server's components by option name.
    """

    endpoint_url: str
    bucket: str
    folder: Path
    ports: dict[str, int]
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill the server with kill -9."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Restart the server on the same objects and ports, without waiting until it responds."""
        self.process = _start(self.folder, self.ports)


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    """Run an S3 server that stores its objects in ``folder``; stop it when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    server = _start_responsive(folder)
    try:
        filesystem = fsspec.filesystem("s3", key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=server.endpoint_url)
        filesystem.mkdirs(server.bucket, exist_ok=True)
        yield server
    finally:
        server.kill()
        _remove_sockets(server.ports)


def _start_responsive(folder: Path) -> S3Server:
    """Start a server and wait until it responds; retry, because another process may take a free port."""
    for _ in range(3):
        ports = s3_ports()
        server = S3Server(f"http://127.0.0.1:{ports['s3.port']}", "runs", folder, ports, _start(folder, ports))
        if _responds(server.process, server.endpoint_url):
            return server
        server.kill()
        _remove_sockets(ports)
    raise AssertionError(f"the S3 server did not start: {(folder / 's3.log').read_text(errors='replace')[-2000:]}")


def _remove_sockets(ports: dict[str, int]) -> None:
    """Remove the Unix sockets of a killed server, whose folder is fixed."""
    for port in ports.values():
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


def server_ports(count: int) -> list[int]:
    """Return different ports that were free on the loopback interface at the time of the call."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    return ports


def s3_ports() -> dict[str, int]:
    """Return a free port for each component by option name; the default ports could clash with another server."""
    components = ("s3", "master", "volume", "filer", "admin")
    names = [name for component in components for name in (f"{component}.port", f"{component}.port.grpc")]
    names.append("metricsPort")
    return dict(zip(names, server_ports(len(names)), strict=True))


def s3_command(folder: Path, ports: dict[str, int]) -> tuple[list[str | Path], dict[str, str]]:
    """Return the command and environment of a server that stores its objects in ``folder``."""
    addresses = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", *(f"-{name}={port}" for name, port in ports.items())]
    addresses += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    weed = [Path(sys.executable).with_name("weed"), "-logtostderr=true", "mini", f"-dir={folder}", *addresses]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    # With 256 MiB, Go collects garbage all the time, which takes a seventh of a processor.
    return [*weed, "-admin.ui=false", "-webdav=false"], keys | {"GOMEMLIMIT": "768MiB"}


def _start(folder: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    command, env = s3_command(folder, ports)
    with (folder / "s3.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **env},
        )


def _responds(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except HTTPError as error:
            error.close()
            return True  # a rejection for missing credentials shows that the server is up
        except URLError:
            time.sleep(0.05)
    return False

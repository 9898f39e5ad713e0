"""A real S3 server in a process of its own, for any test: ``with running_s3(folder) as s3: s3.endpoint_url``."""

from __future__ import annotations

import os
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

from blocks.processes import free_port

ACCESS_KEY = "test-access"
SECRET_KEY = "test-secret"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A started S3 server.

    Attributes:
        endpoint_url: where it answers.
        bucket: a bucket that exists.
        process: the process, to be killed by tests that want that.
    """

    endpoint_url: str
    bucket: str
    process: subprocess.Popen[bytes]


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    """An S3 server that keeps its objects in ``folder``; stopped when the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
    here = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", *(f"-{name}.port={port}" for name, port in ports.items())]
    command = [Path(sys.executable).with_name("weed"), "-logtostderr=true", "mini", f"-dir={folder}", *here]
    with (folder / "s3.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "-admin.ui=false", "-webdav=false"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "GOMEMLIMIT": "256MiB",
            },
        )
    with process:
        try:
            endpoint_url = f"http://127.0.0.1:{ports['s3']}"
            _wait_until_it_answers(process, endpoint_url, folder / "s3.log")
            filesystem = fsspec.filesystem("s3", key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=endpoint_url)
            filesystem.mkdirs("runs", exist_ok=True)
            yield S3Server(endpoint_url, "runs", process)
        finally:
            process.kill()


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except HTTPError as error:
            error.close()
            return  # refused without credentials: it is up
        except URLError:
            time.sleep(0.05)
    raise AssertionError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")

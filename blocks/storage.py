"""Where a run keeps its record: a directory on local disk or below an s3:// prefix, by the same few methods."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol, Self, cast

import fsspec
from fsspec.spec import AbstractFileSystem
from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from blocks.errors import StorageError
from blocks.home import home


class RunDirectory(Protocol):
    """What a run keeps, by file name. Whole-file writes are atomic; appended lines are durable on return."""

    location: str

    def read_bytes(self, name: str) -> bytes | None:
        """The content of a file, or None where there is none."""
        ...

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a whole file: readers see the old content or the new, never a part."""
        ...

    def append_line(self, name: str, line: str) -> None:
        """Add one line and make it durable. A torn tail left by a crash is closed first, never glued to."""
        ...

    def __enter__(self) -> Self:
        """Hold the directory for this process; a second writer is refused where the storage can tell."""
        ...

    def __exit__(self, *_: object) -> None: ...


class LocalDirectory:
    """A run's directory on local disk."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path
        self._lock_file: int | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _storage_error("make", path, error) from error

    def read_bytes(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _storage_error("read", self._path / name, error) from error

    def write_bytes(self, name: str, content: bytes) -> None:
        path = self._path / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _storage_error("write", path, error) from error

    def append_line(self, name: str, line: str) -> None:
        path = self._path / name
        try:
            with path.open("ab+") as file:
                end = file.seek(0, os.SEEK_END)
                torn = end > 0 and (file.seek(end - 1), file.read(1))[1] != b"\n"
                try:
                    file.write((b"\n" if torn else b"") + line.encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), end)  # a full disk must not leave half a record
                    raise
        except OSError as error:
            raise _storage_error("append to", path, error) from error

    def __enter__(self) -> Self:
        path = self._path / ".lock"
        try:
            self._lock_file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock_file, 0)
            os.write(self._lock_file, f"process {os.getpid()}".encode())
        except BlockingIOError as error:
            raise StorageError(
                f"The run in {self.location} is being written by {path.read_text() or 'another process'}: "
                "wait for it, stop it, or choose another run_name."
            ) from error
        except OSError as error:
            raise _storage_error("lock", path, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


class ObjectDirectory:
    """A run's directory below a prefix of an object store; an append is a rewrite of the whole small object."""

    def __init__(self, filesystem: AbstractFileSystem, prefix: str) -> None:
        self.location = str(filesystem.unstrip_protocol(prefix))
        self._filesystem = filesystem
        self._prefix = prefix

    def read_bytes(self, name: str) -> bytes | None:
        self._filesystem.invalidate_cache()
        try:
            return cast(bytes, self._filesystem.cat_file(f"{self._prefix}/{name}"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _storage_error("read", f"{self.location}/{name}", error) from error

    def write_bytes(self, name: str, content: bytes) -> None:
        try:
            self._filesystem.pipe_file(f"{self._prefix}/{name}", content)
        except OSError as error:
            raise _storage_error("write", f"{self.location}/{name}", error) from error

    def append_line(self, name: str, line: str) -> None:
        content = self.read_bytes(name) or b""
        torn = content and not content.endswith(b"\n")
        self.write_bytes(name, content + (b"\n" if torn else b"") + line.encode() + b"\n")

    def __enter__(self) -> Self:
        return self  # an object store has no lock that ends with its process

    def __exit__(self, *_: object) -> None:
        pass


class RunStorage(Block):
    """Where runs keep their records: a local directory or an s3:// prefix."""

    _block_type_name = "Run Storage"
    _block_type_slug = "tinker-flows-run-storage"
    _description = "Where tinker-flows runs keep config, checkpoints.jsonl and reports: a local path or s3://."

    url: str = Field(
        default="",
        title="URL",
        description="A local directory or s3://bucket/prefix; empty means `runs` in the project's home.",
    )
    endpoint_url: str | None = Field(
        default=None, title="S3 endpoint", description="URL of an S3-compatible server; unset means AWS."
    )
    access_key: SecretStr | None = Field(
        default=None, title="Access key", description="S3 access key id; unset means the AWS default chain."
    )
    secret_key: SecretStr | None = Field(
        default=None,
        title="Secret key",
        description="S3 secret access key; unset means the AWS default chain.",
    )

    def run_directory(self, run_name: str) -> RunDirectory:
        """The directory of one run.

        Raises:
            StorageError: it cannot be made or reached.
        """
        url = self.url or str(home() / "runs")
        if "://" not in url:
            return LocalDirectory(Path(url).expanduser().resolve() / run_name)
        try:
            filesystem, path = fsspec.core.url_to_fs(url, **self._options(url))
        except (ValueError, ImportError) as error:
            raise StorageError(
                f"Run storage has the url {url!r}, which no installed filesystem can open ({error}): "
                "use a local path or s3://bucket/prefix."
            ) from error
        return ObjectDirectory(filesystem, f"{path}/{run_name}")

    def _options(self, url: str) -> dict[str, object]:
        if not url.startswith("s3://"):
            return {}
        given = {
            "endpoint_url": self.endpoint_url,
            "key": self.access_key and self.access_key.get_secret_value(),
            "secret": self.secret_key and self.secret_key.get_secret_value(),
        }
        return {name: value for name, value in given.items() if value}


def _storage_error(verb: str, path: object, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(
        f"Could not {verb} {path} ({reason}): free or fix that storage and start the same command again; "
        "everything up to the last line of checkpoints.jsonl is kept."
    )

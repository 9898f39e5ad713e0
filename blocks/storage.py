"""Run storage: a run's files in a local directory or below an s3:// prefix, behind one interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from blocks.errors import StorageError, reason, storage_error
from blocks.files.local import home_path
from blocks.files.local_directory import LocalDirectory
from blocks.urls import check_no_credentials

if TYPE_CHECKING:
    from blocks.files.objects import Objects

CONFIG = "config.json"  # every run has this file from its start


class RunDirectory(Protocol):
    """Files of a run, by name. Whole-file writes are atomic; data is durable once a write returns.

    Every method raises `StorageError` on failure and leaves the earlier content unchanged.
    """

    location: str

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a file, or None if the file does not exist."""
        ...

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a whole file; readers see either the old or the new content."""
        ...

    def append_line(self, name: str, line: str) -> None:
        """Append a line, or several separated by newlines, in one write.

        An incomplete last line left by a crash is terminated first, so that lines never merge.
        """
        ...

    def names(self) -> list[str]:
        """List the names of the files, sorted; the lock file is left out. Empty if the directory does not exist."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or, on a local disk, a folder of files."""
        ...

    def writer(self) -> str:
        """Describe the process that holds the directory; empty if no process does."""
        ...

    def check_writer(self) -> None:
        """Raise an error if another process has taken over the directory; call it before writing elsewhere.

        It does nothing if the directory was never locked.

        Raises:
            StorageError: another process took the directory over, or it was removed.
        """
        ...

    def __enter__(self) -> Self:
        """Lock the directory for this process; a second process gets an error that names the first.

        The lock of a process that ended is free at once, or after 30 s on S3 if the process ran on another machine.
        """
        ...

    def __exit__(self, *_: object) -> None: ...


class RunStorage(Block):
    """Storage of run directories: a local directory or an s3:// prefix.

    Example:
        ```python
        from blocks import RunStorage

        storage = RunStorage.load("BLOCK_NAME")
        with storage.run_directory("my-run") as directory:
            config = directory.read_bytes("config.json")
        ```
    """

    _block_type_name = "Run Storage"
    _block_type_slug = "tinker-flows-run-storage"
    _description = "Local path or s3:// prefix where tinker-flows runs store config, checkpoints.jsonl and reports."

    url: str = Field(
        default="",
        title="URL",
        description="A local directory or s3://bucket/prefix; empty means `runs` in the project home.",
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
    patience_s: float = Field(
        default=600.0,
        ge=0,
        title="Patience (s)",
        description="How long a run waits for an S3 server that has stopped responding. Then the run fails.",
    )

    def run_directory(self, run_name: str) -> RunDirectory:
        """Return the directory of one run. Nothing is created or requested before the first read or write.

        Raises:
            StorageError: `url` is neither a local directory nor an s3:// prefix.
            ConfigError: `url` or `endpoint_url` has a user name or password.
        """
        if runs := self._local_folder():
            return LocalDirectory(runs / run_name)
        from blocks.files.object_directory import ObjectDirectory

        return ObjectDirectory(self._objects(f"/{run_name}"))

    def run_names(self) -> list[str]:
        """List the names of the stored runs, sorted.

        Raises:
            StorageError: `url` is neither a local directory nor an s3:// prefix, or cannot be read.
            ConfigError: `url` or `endpoint_url` has a user name or password.
        """
        runs = self._local_folder()
        if runs is None:
            return [
                name for name in self._objects("").names() if self.run_directory(name).read_bytes(CONFIG) is not None
            ]
        try:
            return sorted(run.name for run in runs.iterdir() if _is_run(run))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error("list", runs, error) from error

    def _local_folder(self) -> Path | None:
        """Return the local directory of all runs; None for S3."""
        for place, url in (("The URL", self.url), ("The S3 endpoint", self.endpoint_url or "")):
            fix = "remove it and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the keys of the block"
            check_no_credentials(url, f"{place} of the run storage", fix)
        scheme, separator, path = self.url.partition("://")
        if not separator:
            try:
                folder = Path(self.url).expanduser().resolve() if self.url else home_path() / "runs"
                is_file = folder.exists() and not folder.is_dir()
            except (OSError, ValueError, RuntimeError) as error:
                raise StorageError(
                    f"The run storage {self.url[:200]!r} is not a usable path ({reason(error)}): set it to a directory."
                ) from error
            if is_file:
                raise StorageError(f"The run storage {str(folder)!r} is not a directory: set it to one.")
            return folder
        if scheme != "s3" or not path.strip("/"):
            raise StorageError(
                f"The run storage url {self.url!r} is neither a local directory nor s3://bucket/prefix: "
                "set it to one of them."
            )
        # A server or s3fs reads these as another key.
        wrong = [segment for segment in path.strip("/").split("/") if segment in ("", ".", "..")]
        if wrong or "?versionId=" in path:
            part = f"the path segment {wrong[0]!r}" if wrong else "'?versionId='"
            raise StorageError(f"The run storage url {self.url!r} has {part}: remove it.")
        return None

    def _objects(self, subpath: str) -> Objects:
        from blocks.files.objects import Objects

        return Objects(
            self.url.partition("://")[2].strip("/") + subpath,
            endpoint_url=self.endpoint_url or None,
            key=self.access_key.get_secret_value() if self.access_key else None,
            secret=self.secret_key.get_secret_value() if self.secret_key else None,
            patience_s=self.patience_s,
        )


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run; also True for a folder that another user does not let this one read."""
    try:
        return (folder / CONFIG).is_file()
    except PermissionError:
        return True

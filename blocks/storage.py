"""Where a run keeps its record: a directory on local disk or below an s3:// prefix, by the same few methods."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from blocks.errors import StorageError, storage_error
from blocks.home import home
from blocks.local_directory import LocalDirectory
from blocks.object_directory import ObjectDirectory
from blocks.objects import Objects

# What a run keeps from its start on.
CONFIG = "config.json"


class RunDirectory(Protocol):
    """What a run keeps, by file name. Whole-file writes are atomic; what was written is durable on return.

    Every method raises `StorageError`, and then leaves what was there before.
    """

    location: str

    def read_bytes(self, name: str) -> bytes | None:
        """The content of a file, or None where there is none."""
        ...

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a whole file: readers see the old content or the new, never a part."""
        ...

    def append_line(self, name: str, line: str) -> None:
        """Add one line. A torn tail left by a crash is closed first, never glued to."""
        ...

    def holder(self) -> str:
        """Who writes the run now, for a person; empty where nobody does."""
        ...

    def __enter__(self) -> Self:
        """Hold the directory for this process; a second one is refused by the name of the first.

        What a holder that ended leaves is free at once; on S3, where another machine holds it, after half a minute.
        """
        ...

    def __exit__(self, *_: object) -> None: ...


class RunStorage(Block):
    """Where runs keep their records: a local directory or an s3:// prefix.

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
    patience_s: float = Field(
        default=600.0,
        ge=0,
        title="Patience (s)",
        description="How long a run waits for an S3 server that answered before and is away, before it ends.",
    )

    def run_directory(self, run_name: str) -> RunDirectory:
        """The directory of one run. Nothing is made, or asked of S3, before the first read or write.

        Raises:
            StorageError: the url is of neither kind.
        """
        if runs := self._folder():
            return LocalDirectory(runs / run_name)
        return ObjectDirectory(self._objects(f"/{run_name}"))

    def run_names(self) -> list[str]:
        """The runs that it holds, in the order of their names.

        Raises:
            StorageError: the url is of neither kind, or cannot be read.
        """
        runs = self._folder()
        if runs is None:
            return [
                name for name in self._objects("").names() if self.run_directory(name).read_bytes(CONFIG) is not None
            ]
        try:
            return sorted(each.name for each in runs.iterdir() if (each / CONFIG).is_file())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error("list", runs, error) from error

    def _folder(self) -> Path | None:
        """The local directory of all runs; None for S3."""
        scheme, separator, path = self.url.partition("://")
        if not separator:
            return Path(self.url).expanduser().resolve() if self.url else home() / "runs"
        if scheme != "s3" or not path.strip("/"):
            raise StorageError(
                f"Run storage has the url {self.url!r}, which is neither a local directory nor s3://bucket/prefix: "
                "set it to one of them."
            )
        return None

    def _objects(self, below: str) -> Objects:
        return Objects(
            self.url.partition("://")[2].strip("/") + below,
            endpoint_url=self.endpoint_url or None,
            key=self.access_key.get_secret_value() if self.access_key else None,
            secret=self.secret_key.get_secret_value() if self.secret_key else None,
            patience_s=self.patience_s,
        )

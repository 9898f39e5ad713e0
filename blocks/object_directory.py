"""A run's directory below a prefix of an S3 bucket."""

from __future__ import annotations

from typing import Any, Self, cast

from botocore.exceptions import BotoCoreError, ClientError
from s3fs import S3FileSystem

from blocks.errors import StorageError, storage_error

# Rides out a server's restart (some 8 s of retries), and gives up on one that is silent in a minute and a half.
PATIENCE = {"connect_timeout": 10, "read_timeout": 20, "retries": {"mode": "standard", "max_attempts": 5}}

_FAILURES = (OSError, BotoCoreError, ValueError)


class ObjectDirectory:
    """A `RunDirectory` on S3.

    An object store has no append and no lock that ends with its process. An append rewrites the whole small object
    under the condition that it is still the one that was read, so a second writer is refused at its first line.
    """

    def __init__(self, prefix: str, *, endpoint_url: str | None, key: str | None, secret: str | None) -> None:
        self.location = f"s3://{prefix}"
        self._prefix = prefix
        self._s3 = S3FileSystem(
            key=key, secret=secret, endpoint_url=endpoint_url, use_listings_cache=False, config_kwargs=PATIENCE
        )
        self._s3.retries = 1  # botocore's retries are enough; s3fs would multiply them by five

    def read_bytes(self, name: str) -> bytes | None:
        try:
            return cast(bytes, self._s3.cat_file(f"{self._prefix}/{name}"))
        except FileNotFoundError:
            return None
        except _FAILURES as error:
            raise storage_error("read", f"{self.location}/{name}", error) from error

    def write_bytes(self, name: str, content: bytes) -> None:
        try:
            self._s3.pipe_file(f"{self._prefix}/{name}", content)
        except _FAILURES as error:
            raise storage_error("write", f"{self.location}/{name}", error) from error

    def append_line(self, name: str, line: str) -> None:
        unchanged = self._condition(name)
        before = self.read_bytes(name) or b""
        is_torn = before and not before.endswith(b"\n")
        content = before + (b"\n" if is_torn else b"") + line.encode() + b"\n"
        try:
            self._s3.pipe_file(f"{self._prefix}/{name}", content, **unchanged)
        except _FAILURES as error:
            if not _is_conflict(error):
                raise storage_error("append to", f"{self.location}/{name}", error) from error
            # A write whose answer was lost is sent again, and then meets itself.
            if self.read_bytes(name) != content:
                raise StorageError(
                    f"The run in {self.location} is being written by another process: "
                    "wait for it, stop it, or choose another run_name."
                ) from error

    def _condition(self, name: str) -> dict[str, Any]:
        """That the object stays as it is now. Asked for before its content is read, so that no change is missed."""
        bucket, key, _ = self._s3.split_path(f"{self._prefix}/{name}")
        try:
            head = cast(dict[str, Any], self._s3.call_s3("head_object", Bucket=bucket, Key=key))
            return {"IfMatch": head["ETag"]}
        except FileNotFoundError:
            return {"IfNoneMatch": "*"}
        except _FAILURES as error:
            raise storage_error("read", f"{self.location}/{name}", error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _is_conflict(error: Exception) -> bool:
    """True where a conditional write was refused: 412, or on AWS 409 for two at the same moment."""
    cause = error.__cause__
    return isinstance(cause, ClientError) and cause.response["Error"].get("Code") in (
        "PreconditionFailed",
        "ConditionalRequestConflict",
    )

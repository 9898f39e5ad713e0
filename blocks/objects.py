"""Whole objects below a prefix of an S3 bucket, read and written through restarts of the server."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast

from aiohttp import ClientPayloadError
from botocore import exceptions as botocore
from botocore.exceptions import BotoCoreError, ClientError
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from s3fs import S3FileSystem

from blocks.errors import reason, storage_error

T = TypeVar("T")

# botocore's own retries: some 8 s for a server that refuses, a minute and a half for one that is silent.
CLIENT = {"connect_timeout": 10, "read_timeout": 20, "retries": {"mode": "standard", "max_attempts": 5}}
LONGEST_PAUSE_S = 30.0
MAX_SINGLE_PUT = 5 * 2**30

# Broken off on the way; aiohttp's own is what a body that ends too early raises.
_LOST = (
    botocore.ConnectionError,
    botocore.HTTPClientError,
    botocore.IncompleteReadError,
    ClientPayloadError,
    ConnectionError,
    TimeoutError,
    FSTimeoutError,
)
_FAILURES = (OSError, BotoCoreError, ClientPayloadError, ValueError)

# Endpoints that answered this process once: one that never did is more likely misspelt than restarting.
_answered: set[str | None] = set()


class ChangedError(Exception):
    """A conditional write was refused: the object is no longer what it was."""


class Objects:
    """The objects of one run.

    A request that fails in a way that can pass (no connection, no answer, 429, 5xx) is made again, with growing pauses,
    for `patience_s`: it is either a read or a write that may be repeated.
    """

    def __init__(
        self, prefix: str, *, endpoint_url: str | None, key: str | None, secret: str | None, patience_s: float
    ) -> None:
        self.location = f"s3://{prefix}"
        self._prefix, self._endpoint_url, self._patience_s = prefix, endpoint_url, patience_s
        self._s3 = S3FileSystem(
            key=key, secret=secret, endpoint_url=endpoint_url, use_listings_cache=False, config_kwargs=CLIENT
        )
        self._s3.retries = 1  # botocore's retries are enough; s3fs would multiply them by five

    def read(self, name: str) -> bytes | None:
        """The content of an object, or None where there is none.

        Raises:
            StorageError: it could not be read, within the patience.
        """
        return self._patiently("read", name, lambda: self._read(name), self._patience_s)

    def version(self, name: str) -> str | None:
        """What changes with every other content of an object; None where there is none.

        Raises:
            StorageError: the server could not be asked, within the patience.
        """
        return self._patiently("read", name, lambda: self._version(name), self._patience_s)

    def names(self) -> list[str]:
        """What lies below the prefix, one level deep; empty where nothing does.

        Raises:
            StorageError: the server could not be asked, within the patience.
        """
        return self._patiently("list", "", self._names, self._patience_s)

    def age_s(self, name: str) -> float:
        """Seconds since an object was written, by the server's own clock; 0 where there is none.

        Raises:
            StorageError: the server could not be asked, within the patience.
        """
        return self._patiently("read", name, lambda: self._age_s(name), self._patience_s)

    def remove(self, name: str) -> None:
        """Remove an object.

        Raises:
            StorageError: it could not be removed, within the patience.
        """
        self._patiently("remove", name, lambda: self._s3.rm_file(self._path(name)), self._patience_s)

    def write(self, name: str, content: bytes, version: str | None, *, patient: bool = True) -> str:
        """Write a whole object in place of a version of it, or of none; returns the new version.

        Raises:
            ChangedError: it is there in another version. So is one that was written and its answer lost: it is written
                again, and then meets itself.
            StorageError: it could not be written, within the patience.
        """
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}

        def put() -> str:
            # In one request whatever its size: an upload in parts has no condition at its start.
            answer = self._s3.pipe_file(self._path(name), content, chunksize=MAX_SINGLE_PUT, **condition)
            return _version_in(cast(dict[str, Any], answer))

        return self._patiently("write", name, put, self._patience_s if patient else 0)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _read(self, name: str) -> bytes | None:
        try:
            return cast(bytes, sync(self._s3.loop, self._get, *self._bucket_and_key(name)))
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":  # a missing bucket is no empty run
                raise
            return None

    async def _get(self, bucket: str, key: str) -> bytes:
        answer = await self._s3._call_s3("get_object", Bucket=bucket, Key=key)
        _version_in(answer)
        async with answer["Body"] as body:
            return await body.read()

    def _version(self, name: str) -> str | None:
        try:
            return _version_in(self._head(name))
        except FileNotFoundError:
            return None

    def _age_s(self, name: str) -> float:
        try:
            answer = self._head(name)
        except FileNotFoundError:
            return 0.0
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return (now - answer["LastModified"]).total_seconds()

    def _names(self) -> list[str]:
        try:
            found = cast(list[str], self._s3.ls(self._prefix, detail=False))
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def _head(self, name: str) -> dict[str, Any]:
        bucket, key = self._bucket_and_key(name)
        return cast(dict[str, Any], self._s3.call_s3("head_object", Bucket=bucket, Key=key))

    def _bucket_and_key(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self._s3.split_path(self._path(name))
        return bucket, key

    def _patiently(self, verb: str, name: str, request: Callable[[], T], patience_s: float) -> T:
        since: float | None = None
        for attempt in itertools.count():
            try:
                answer = request()
            except _FAILURES as error:
                if _is_conflict(error):
                    raise ChangedError from error
                since = since or time.monotonic()
                patience_s = patience_s if self._endpoint_url in _answered else 0
                if not _can_pass(error) or time.monotonic() - since >= patience_s:
                    raise storage_error(verb, f"{self.location}/{name}", error) from error
                if attempt == 0:
                    print(
                        f"Could not {verb} {self.location}/{name} ({reason(error)}); it is tried again for up to "
                        f"{patience_s:.0f} s.",
                        file=sys.stderr,
                    )
                time.sleep(min(2.0**attempt, LONGEST_PAUSE_S, patience_s) * random.uniform(0.5, 1.0))
            else:
                _answered.add(self._endpoint_url)
                return answer
        raise AssertionError("unreachable: the loop has no end")


def _version_in(answer: Mapping[str, Any]) -> str:
    """The version that an answer tells.

    Without one it is the page of a proxy or a portal on the way: taken for an empty record, it would become the record.
    """
    if "ETag" not in answer:
        raise ConnectionError("the answer is not that of an S3 server")
    return str(answer["ETag"])


def _response(error: Exception) -> dict[str, Any]:
    cause = error if isinstance(error, ClientError) else error.__cause__
    return cast(dict[str, Any], cause.response) if isinstance(cause, ClientError) else {}


def _code(error: Exception) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _is_conflict(error: Exception) -> bool:
    """True where a conditional write was refused: 412, or on AWS 409 for two at the same moment."""
    return _code(error) in ("PreconditionFailed", "ConditionalRequestConflict")


def _can_pass(error: Exception) -> bool:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or status == 429 or _code(error) == "SlowDown":
        return True
    return isinstance(error, _LOST)

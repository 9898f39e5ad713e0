"""Whole objects below a prefix of an S3 bucket; requests are retried while the server restarts."""

from __future__ import annotations

import itertools
import random
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
from blocks.terminal import print_notice

T = TypeVar("T")

# botocore does not count the first attempt here, so there are up to six: they take about 12 s if the server refuses
# connections, and 140 s if it accepts them and never answers.
CLIENT = {"connect_timeout": 10, "read_timeout": 20, "retries": {"mode": "standard", "max_attempts": 5}}
LONGEST_PAUSE_S = 30.0
MAX_SINGLE_PUT = 5 * 2**30  # S3's limit for one request

# Failures of the connection. aiohttp raises ClientPayloadError for a truncated body.
_CONNECTION_ERRORS = (
    botocore.ConnectionError,
    botocore.HTTPClientError,
    botocore.IncompleteReadError,
    ClientPayloadError,
    ConnectionError,
    TimeoutError,
    FSTimeoutError,
)
_FAILURES = (OSError, BotoCoreError, ClientPayloadError, ValueError)

# Endpoints that have responded to this process. An endpoint that never did is more likely misspelled than restarting.
_responsive_endpoints: set[str | None] = set()


class ChangedError(Exception):
    """Conditional write that the server rejected because the object has another version."""


class Objects:
    """Objects below one prefix.

    Requests are idempotent. A request with a transient failure (no connection, no response, 429, 5xx) is retried with
    growing pauses for up to `patience_s`, once the endpoint has responded to this process.
    """

    def __init__(
        self, prefix: str, *, endpoint_url: str | None, key: str | None, secret: str | None, patience_s: float
    ) -> None:
        self.location = f"s3://{prefix}"
        self._prefix, self._endpoint_url, self._patience_s = prefix, endpoint_url, patience_s
        self._s3 = S3FileSystem(
            key=key, secret=secret, endpoint_url=endpoint_url, use_listings_cache=False, config_kwargs=CLIENT
        )
        self._s3.retries = 1  # botocore retries already; the default of s3fs would multiply its retries by five

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, or None if the object does not exist.

        Raises:
            StorageError: the object could not be read within `patience_s`.
        """
        return self._retry("read", name, lambda: self._read(name), self._patience_s)

    def version(self, name: str) -> str | None:
        """Return the version of an object, which changes with its content; None if the object does not exist.

        Raises:
            StorageError: the server did not respond within `patience_s`.
        """
        return self._retry("read", name, lambda: self._version(name), self._patience_s)

    def names(self) -> list[str]:
        """List the names directly below the prefix.

        Raises:
            StorageError: the server did not respond within `patience_s`.
        """
        return self._retry("list", "", self._names, self._patience_s)

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the server's clock; 0 if the object does not exist.

        Raises:
            StorageError: the server did not respond within `patience_s`.
        """
        return self._retry("read", name, lambda: self._age_s(name), self._patience_s)

    def remove(self, name: str) -> None:
        """Remove an object.

        Raises:
            StorageError: the object could not be removed within `patience_s`.
        """
        self._retry("remove", name, lambda: self._s3.rm_file(self._path(name)), self._patience_s)

    def write(self, name: str, content: bytes, version: str | None, *, patient: bool = True) -> str:
        """Write a whole object if its current version is `version` (None: it does not exist); return the new version.

        Args:
            patient: False to leave retries to botocore; True to retry for `patience_s`.

        Raises:
            ChangedError: the object has another version. Also raised if an earlier attempt succeeded but its response
                was lost, because the retry then finds the new version.
            StorageError: the object could not be written within `patience_s`.
        """
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}

        def put() -> str:
            # A single request of any size: a multipart upload cannot start with a condition.
            response = self._s3.pipe_file(self._path(name), content, chunksize=MAX_SINGLE_PUT, **condition)
            return _version_in(cast(dict[str, Any], response))

        return self._retry("write", name, put, self._patience_s if patient else 0)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _read(self, name: str) -> bytes | None:
        try:
            return cast(bytes, sync(self._s3.loop, self._get, *self._bucket_and_key(name)))
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":  # a missing bucket is an error, not an empty run
                raise
            return None

    async def _get(self, bucket: str, key: str) -> bytes:
        response = await self._s3._call_s3("get_object", Bucket=bucket, Key=key)
        _version_in(response)  # reject the page of a proxy
        async with response["Body"] as body:
            return await body.read()

    def _version(self, name: str) -> str | None:
        try:
            return _version_in(self._head(name))
        except FileNotFoundError:
            return None

    def _age_s(self, name: str) -> float:
        try:
            response = self._head(name)
        except FileNotFoundError:
            return 0.0
        now = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
        return (now - response["LastModified"]).total_seconds()

    def _names(self) -> list[str]:
        try:
            paths = cast(list[str], self._s3.ls(self._prefix, detail=False))
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise
            return []
        # Some servers keep an object for the prefix itself.
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != self._prefix)

    def _head(self, name: str) -> dict[str, Any]:
        bucket, key = self._bucket_and_key(name)
        return cast(dict[str, Any], self._s3.call_s3("head_object", Bucket=bucket, Key=key))

    def _bucket_and_key(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self._s3.split_path(self._path(name))
        return bucket, key

    def _retry(self, verb: str, name: str, request: Callable[[], T], patience_s: float) -> T:
        """Return the result of a request; retry transient failures if the endpoint has responded to this process.

        Args:
            verb: the operation, for the error message.

        Raises:
            ChangedError: the server rejected a conditional write.
            StorageError: the request failed for another reason, or failed for `patience_s`.
        """
        first_failure: float | None = None
        for attempt in itertools.count():
            try:
                result = request()
            except _FAILURES as error:
                if _is_conflict(error):
                    raise ChangedError from error
                first_failure = first_failure or time.monotonic()
                patience_s = patience_s if self._endpoint_url in _responsive_endpoints else 0
                if not _is_transient(error) or time.monotonic() - first_failure >= patience_s:
                    raise storage_error(verb, f"{self.location}/{name}", error, self._remedy(error)) from error
                if attempt == 0:
                    print_notice(
                        f"Could not {verb} {self.location}/{name} ({reason(error)}); retrying for up to "
                        f"{patience_s:.0f} s."
                    )
                time.sleep(min(2.0**attempt, LONGEST_PAUSE_S, patience_s) * random.uniform(0.5, 1.0))
            else:
                _responsive_endpoints.add(self._endpoint_url)
                return result
        raise AssertionError("unreachable: the loop has no end")

    def _remedy(self, error: Exception) -> str:
        """Return the remedy of an error with a known cause; empty for other errors."""
        if _code(error) == "NoSuchBucket":
            return f"create the bucket {self._bucket_and_key('')[0]}, or set storage to an existing one,"
        if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError):
            return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the keys of the storage block,"
        if isinstance(error, botocore.EndpointConnectionError):
            return "start its server, or correct AWS_ENDPOINT_URL or the endpoint of the storage block,"
        return ""


def _version_in(response: Mapping[str, Any]) -> str:
    """Return the ETag of a response.

    A response without an ETag is the page of a proxy or login portal. Accepting it as an empty record would overwrite
    the real record.
    """
    if "ETag" not in response:
        raise ConnectionError("the response has no ETag and does not come from an S3 server")
    return str(response["ETag"])


def _response(error: Exception) -> dict[str, Any]:
    cause = error if isinstance(error, ClientError) else error.__cause__
    return cast(dict[str, Any], cause.response) if isinstance(cause, ClientError) else {}


def _code(error: Exception) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _is_conflict(error: Exception) -> bool:
    """Return whether a conditional write was rejected.

    The status is 412, or on AWS 409 for two simultaneous writes and 404 for a deleted object.
    """
    return _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")


def _is_transient(error: Exception) -> bool:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or status == 429 or _code(error) == "SlowDown":
        return True
    return isinstance(error, _CONNECTION_ERRORS)

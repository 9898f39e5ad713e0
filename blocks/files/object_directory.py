"""Run directory below a prefix of an S3 bucket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Self

from blocks.files.lease import NAME as LEASE_NAME
from blocks.files.lease import Lease
from blocks.files.lock_holder import taken_over_error
from blocks.files.objects import ChangedError, Objects

PROBE = ".probe"


class ObjectDirectory:
    """`RunDirectory` on S3.

    An object store has no append, so appending rewrites the whole small object. Every write is conditional on the
    object being unchanged since it was read: a writer that lost its lease unnoticed cannot overwrite another writer's
    lines.
    """

    def __init__(self, objects: Objects) -> None:
        self.location = objects.location
        self._objects = objects
        self._lease = Lease(objects)

    def read_bytes(self, name: str) -> bytes | None:
        content = self._objects.read(name)
        if content is None:
            self._lease.verify()  # the whole prefix may have been deleted
        return content

    def write_bytes(self, name: str, content: bytes) -> None:
        self._replace(name, lambda _: content)

    def append_line(self, name: str, line: str) -> None:
        def append(content: bytes) -> bytes:
            is_torn = content and not content.endswith(b"\n")
            return content + (b"\n" if is_torn else b"") + line.encode() + b"\n"

        self._replace(name, append)

    def names(self) -> list[str]:
        return [name for name in self._objects.names() if name != LEASE_NAME]

    def remove(self, name: str) -> None:
        self._lease.verify()
        self._objects.remove(name)

    def supports_conditional_writes(self) -> bool:
        """Write a test object; return whether the server refuses to overwrite an existing object under If-None-Match.

        Raises:
            StorageError: the test object cannot be written.
        """
        with suppress(ChangedError):  # a retry finds the object if only the response was lost
            self._objects.write(PROBE, b"one", None)
        try:
            self._objects.write(PROBE, b"two", None)
        except ChangedError:
            return True
        else:
            return False
        finally:
            self._objects.remove(PROBE)

    def _replace(self, name: str, change: Callable[[bytes], bytes]) -> None:
        self._lease.verify()
        version = self._objects.version(name)  # read before the content, so that no change is missed
        content = change(self._objects.read(name) or b"" if version else b"")
        try:
            self._objects.write(name, content, version)
        except ChangedError as error:
            if self._objects.read(name) != content:
                raise taken_over_error(self.location, "another process") from error

    def check_writer(self) -> None:
        self._lease.check()

    def writer(self) -> str:
        return str(self._lease.holder() or "")

    def __enter__(self) -> Self:
        self._lease.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.release()

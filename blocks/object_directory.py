"""A run's directory below a prefix of an S3 bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from blocks.holder import refusal
from blocks.lease import Lease
from blocks.objects import ChangedError, Objects

PROBE = ".probe"


class ObjectDirectory:
    """A `RunDirectory` on S3.

    An object store has no append: it rewrites the whole small object. Every write is made under the condition that the
    object is still the one that was read, so that a writer that lost its lease unawares loses no line of another's.
    """

    def __init__(self, objects: Objects) -> None:
        self.location = objects.location
        self._objects = objects
        self._lease = Lease(objects)

    def read_bytes(self, name: str) -> bytes | None:
        return self._objects.read(name)

    def write_bytes(self, name: str, content: bytes) -> None:
        self._replace(name, lambda _: content)

    def append_line(self, name: str, line: str) -> None:
        def appended(before: bytes) -> bytes:
            is_torn = before and not before.endswith(b"\n")
            return before + (b"\n" if is_torn else b"") + line.encode() + b"\n"

        self._replace(name, appended)

    def writes_conditionally(self) -> bool:
        """Write an object and remove it again, to see whether the server leaves alone what it is told to.

        Raises:
            StorageError: it cannot be written.
        """
        version = self._objects.write(PROBE, b"one", None)
        try:
            self._objects.write(PROBE, b"two", None)
        except ChangedError:
            return bool(version)
        else:
            return False
        finally:
            self._objects.remove(PROBE)

    def _replace(self, name: str, change: Callable[[bytes], bytes]) -> None:
        self._lease.check()
        version = self._objects.version(name)  # before the content, so that no change is missed
        content = change(self._objects.read(name) or b"" if version else b"")
        try:
            self._objects.write(name, content, version)
        except ChangedError as error:
            if self._objects.read(name) != content:
                raise refusal(self.location, "another process") from error

    def holder(self) -> str:
        return str(self._lease.holder() or "")

    def __enter__(self) -> Self:
        self._lease.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.release()

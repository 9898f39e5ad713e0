"""Write lock of a run on S3: a lease object that its holder renews and that another process may take over once stale.

An object store has no lock that ends with its process. Every write of the lease is conditional on its last known
version: of two processes that compete for it one wins, and a holder that lost the lease notices at its next renewal.
Clocks of different machines are never compared. A process may take over a lease that it has watched unchanged for
`LEASE_S`, or at once if the holder is known to have ended.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

from blocks.errors import StorageError
from blocks.files.lock_holder import (
    LOCAL_LOCK,
    LockHolder,
    current_process,
    locked_error,
    removed_error,
    taken_over_error,
)
from blocks.files.objects import ChangedError, Objects
from blocks.terminal import print_notice

LEASE_S = 30.0
NAME = ".lock"


class Lease:
    """Right to write the objects of one run."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._own: LockHolder | None = None
        self._lost: StorageError | None = None
        self._version = ""
        self._num_renewals = 0
        self._renewed_at = 0.0
        self._renewal_lock = threading.Lock()
        self._stop = threading.Event()
        self._renewal_thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquire the lease; watch a lease of unknown state for up to `LEASE_S` to see whether its holder is alive.

        Raises:
            StorageError: another process holds the lease (the message names it), or the server cannot be reached.
        """
        own = current_process()
        holder, version = self._read()
        if holder and not holder.has_ended():
            print_notice(
                f"The run in {self._objects.location} was last written by {holder}, which may have ended. "
                f"Watching its lease for up to {LEASE_S:.0f} s."
            )
            holder, version = self._wait_until_stale(holder, version)
        self._own, self._lost = own, None
        try:
            self._write(version)
        except ChangedError:
            self._resolve_conflict(own)
        except StorageError:
            self._own = None
            raise
        self._stop.clear()
        self._renewal_thread = threading.Thread(target=self._renew_periodically, name="lease", daemon=True)
        self._renewal_thread.start()

    def check(self) -> None:
        """Check that the lease is still held; do nothing if it was never acquired.

        Sends a request only if the last renewal is older than `LEASE_S`.

        Raises:
            LostRunError: the last renewal found that another process has taken over the lease (the message names it),
                or that the lease was deleted.
            StorageError: the server cannot be reached.
        """
        if self._own and _now() - self._renewed_at > LEASE_S:
            self._renew(patient=True)
        if self._lost:
            raise self._lost

    def verify(self) -> None:
        """Check that the stored lease is still this process's own; do nothing if it was never acquired.

        Sends a request, and so also notices what has happened since the last renewal.

        Raises:
            LostRunError, StorageError: as for `check`.
        """
        self.check()
        with self._renewal_lock:
            if not self._own or self._objects.version(NAME) == self._version:
                return
            try:
                self._resolve_conflict(self._own)
            except StorageError as error:
                self._lost = error
                raise

    def release(self) -> None:
        """Release the lease; if the server is unreachable, the next process takes it over once stale."""
        own, self._own = self._own, None
        self._stop.set()
        if self._renewal_thread:
            self._renewal_thread.join(timeout=LEASE_S)
        if own and not self._lost:
            try:
                self._objects.write(NAME, b"{}", self._version, patient=False)
            except (ChangedError, StorageError) as error:
                print_notice(f"Could not release the lease of {self._objects.location}: {error}")

    def holder(self) -> LockHolder | None:
        """Return the holder of the lease; None if the lease is free, expired or held by a process that has ended."""
        holder, version = self._read()
        if holder is None or version is None or holder.has_ended() or self._objects.age_s(NAME) > LEASE_S:
            return None
        return holder

    def _read(self) -> tuple[LockHolder | None, str | None]:
        """Return the holder recorded in the lease and the version of the lease; None for each that is missing."""
        version = self._objects.version(NAME)  # read before the content, so that no change is missed
        content = self._objects.read(NAME) if version else None
        if content and content.startswith(LOCAL_LOCK):  # copied from a local directory, in which it locks nothing here
            return None, version
        try:
            fields = json.loads(content or b"{}")
            return (LockHolder(**fields["holder"]) if fields else None), version
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self._objects.location}/{NAME} is not a valid lease: delete it if no process is writing that run."
            ) from error

    def _wait_until_stale(self, holder: LockHolder, version: str | None) -> tuple[LockHolder | None, str | None]:
        """Wait until the lease was released or stayed unchanged for `LEASE_S`; return its holder and version.

        A released lease has no holder (None), and a deleted lease has no version (None).

        Raises:
            StorageError: the holder has renewed the lease.
        """
        until = _now() + LEASE_S
        while _now() < until:
            time.sleep(LEASE_S / 10)
            started = _now()
            new_holder, new_version = self._read()
            if new_holder and new_version != version:
                raise locked_error(self._objects.location, new_holder)
            if new_holder is None:
                return None, new_version
            if _now() - started > LEASE_S / 10:  # the server was unreachable, so nobody could renew
                until = _now() + LEASE_S
        return holder, version

    def _renew_periodically(self) -> None:
        while not self._stop.wait(LEASE_S / 3) and not self._lost:
            try:
                self._renew(patient=False)
            except StorageError:
                continue  # `check` renews before the next write and raises this error if it persists

    def _renew(self, *, patient: bool) -> None:
        with self._renewal_lock:
            if not self._own or self._lost:
                return
            try:
                self._write(self._version, patient=patient)
            except ChangedError:
                try:
                    self._resolve_conflict(self._own)
                except StorageError as error:
                    self._lost = error

    def _write(self, version: str | None, *, patient: bool = True) -> None:
        assert self._own is not None
        self._num_renewals += 1
        content = json.dumps({"holder": asdict(self._own), "renewal": self._num_renewals})
        started = _now()
        self._version = self._objects.write(NAME, content.encode(), version, patient=patient)
        self._renewed_at = started

    def _resolve_conflict(self, own: LockHolder) -> None:
        """Accept a changed lease if this process wrote it by a request whose response was lost.

        Raises:
            LostRunError: another process has taken over the lease, or the lease was deleted.
        """
        started = _now()
        holder, version = self._read()
        if version is None:
            self._own = None
            raise removed_error(self._objects.location)
        if holder is None or holder.token != own.token:
            self._own = None
            raise taken_over_error(self._objects.location, holder or "another process")
        self._version, self._renewed_at = version, started


def _now() -> float:
    """Return seconds on a clock that cannot be set; if possible, one that also runs while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()

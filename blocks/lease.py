"""Who may write a run on S3: an object that its holder renews, and that another may take once it is left alone.

An object store has no lock that ends with its process. The lease is written only under the condition that it is still
what was last seen of it, so that of two who take it one wins, and a holder that lost it learns so by its next renewal.
No clock is compared with another machine's: a lease is taken over when it has not changed for `LEASE_S` before the
eyes of who wants it, or at once where its process can be seen to have ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict

from blocks.errors import StorageError
from blocks.holder import Holder, refusal, this_process
from blocks.objects import ChangedError, Objects

LEASE_S = 30.0
NAME = ".lock"


class Lease:
    """The right to write the objects of one run."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._own: Holder | None = None
        self._lost: StorageError | None = None
        self._version = ""
        self._num_renewals = 0
        self._renewed_at = 0.0
        self._one_renewal = threading.Lock()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease, after waiting for up to `LEASE_S` to see whether its last holder is alive.

        Raises:
            StorageError: another process holds it, and is named; or the server could not be asked.
        """
        own = this_process()
        holder, version = self.look()
        if holder and not holder.is_gone():
            print(
                f"The run in {self._objects.location} was last written by {holder}, which may have ended: "
                f"its lease is watched for up to {LEASE_S:.0f} s.",
                file=sys.stderr,
            )
            holder, version = self._watch(holder, version)
        self._own, self._lost = own, None
        try:
            self._put(version)
        except ChangedError:
            self._meet(own)
        except StorageError:
            self._own = None
            raise
        self._stop.clear()
        self._keeper = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._keeper.start()

    def check(self) -> None:
        """Make sure, before a write, that the lease is still held; without one, nothing is checked.

        Raises:
            StorageError: another process has taken it over, and is named; or the server could not be asked.
        """
        if self._own and time.monotonic() - self._renewed_at > LEASE_S:
            self._renew(patient=True)
        if self._lost:
            raise self._lost

    def release(self) -> None:
        """Leave the lease to whoever comes next; where the server is gone, it is taken over later."""
        own, self._own = self._own, None
        self._stop.set()
        if self._keeper:
            self._keeper.join(timeout=LEASE_S)
        if own and not self._lost:
            try:
                self._objects.write(NAME, b"{}", self._version, patient=False)
            except (ChangedError, StorageError) as error:
                print(f"The lease of {self._objects.location} was not given back: {error}", file=sys.stderr)

    def holder(self) -> Holder | None:
        """Who holds the lease, as far as a look from outside tells: it was renewed not longer ago than `LEASE_S`."""
        holder, version = self.look()
        if holder is None or version is None or holder.is_gone() or self._objects.age_s(NAME) > LEASE_S:
            return None
        return holder

    def look(self) -> tuple[Holder | None, str | None]:
        """The holder of the lease, if any, and its version; asked before the holder, so that no change is missed."""
        version = self._objects.version(NAME)
        content = self._objects.read(NAME) if version else None
        try:
            fields = json.loads(content or b"{}")
            return (Holder(**fields["holder"]) if fields else None), version
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self._objects.location}/{NAME} is no lease of a run: remove it, where no process writes that run."
            ) from error

    def _watch(self, holder: Holder, version: str | None) -> tuple[Holder | None, str | None]:
        """Return once the lease was given back, or left alone for `LEASE_S`; refuse where it was renewed."""
        until = time.monotonic() + LEASE_S
        while time.monotonic() < until:
            time.sleep(LEASE_S / 10)
            asked = time.monotonic()
            now, later = self.look()
            if now and later != version:
                raise refusal(self._objects.location, now)
            if now is None:
                return None, later
            if time.monotonic() - asked > LEASE_S / 10:  # while the server was away nobody could renew
                until = time.monotonic() + LEASE_S
        return holder, version

    def _keep(self) -> None:
        while not self._stop.wait(LEASE_S / 3) and not self._lost:
            try:
                self._renew(patient=False)
            except StorageError:
                continue  # the next write asks again, and says why it fails

    def _renew(self, *, patient: bool) -> None:
        with self._one_renewal:
            if not self._own or self._lost:
                return
            try:
                self._put(self._version, patient=patient)
            except ChangedError:
                try:
                    self._meet(self._own)
                except StorageError as error:
                    self._lost = error

    def _put(self, version: str | None, *, patient: bool = True) -> None:
        assert self._own is not None
        self._num_renewals += 1
        content = json.dumps({"holder": asdict(self._own), "renewal": self._num_renewals})
        asked = time.monotonic()
        self._version = self._objects.write(NAME, content.encode(), version, patient=patient)
        self._renewed_at = asked

    def _meet(self, own: Holder) -> None:
        """After a refused write: go on where what was met is one's own, whose answer was lost; else give up."""
        asked = time.monotonic()
        holder, version = self.look()
        if holder is None or version is None or holder.token != own.token:
            self._own = None
            raise refusal(self._objects.location, holder or "another process")
        self._version, self._renewed_at = version, asked

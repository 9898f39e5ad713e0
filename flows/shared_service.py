"""One Tinker service for all trials of a sweep: a local engine is started once, and named to them by a block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from blocks import TinkerService
from flows.blocks_of import service_of, service_url
from flows.config import RunConfig
from tasks.page import artifact_key


@contextmanager
def shared_service(config: RunConfig, run_name: str, location: str) -> Iterator[str]:
    """The `base_url` of all trials of a sweep, of this name and in this place.

    Raises:
        ServiceError: the engine did not start.
        ServiceLostError: it ended while it was in use.
    """
    if service_url(config.base_url):
        yield config.base_url
        return
    # Its key is in the block, so that no other reads it, and workers on this machine find it.
    name = artifact_key("sweep", f"{run_name[:40]}-{hashlib.sha256(location.encode()).hexdigest()[:12]}")
    with service_of(config) as service:
        service.save(name, overwrite=True)
        try:
            yield f"block:{name}"
        finally:
            with suppress(ValueError):  # it is deleted already
                TinkerService.delete(name)

"""The blocks that a config names: saved ones by `block:NAME`, plain ones by their URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from prefect.blocks.core import Block

from blocks import MLflowTracking, RunStorage, TinkerService
from blocks.errors import ConfigError
from blocks.processes import local_engine
from blocks.service import from_environment
from flows.config import PlaceConfig, TrackedConfig

B = TypeVar("B", bound=Block)


@contextmanager
def service_of(config: PlaceConfig) -> Iterator[TinkerService]:
    """The Tinker service of a run; one that it starts for itself is stopped at the end."""
    if _runs_its_own(config.base_url):
        with local_engine(model=config.model, **config.engine.model_dump()) as service:
            yield service
    else:
        yield _block(TinkerService, config.base_url, base_url=config.base_url or None)


def service_at(base_url: str) -> TinkerService | None:
    """The service that a config's `base_url` names; None for an engine of the run's own."""
    return None if _runs_its_own(base_url) else _block(TinkerService, base_url, base_url=base_url or None)


def service_url(base_url: str) -> str:
    """Where the service is that a config's `base_url` names; empty for an engine of the run's own."""
    service = service_at(base_url)
    return service.resolved_url if service else ""


def storage_of(config: PlaceConfig) -> RunStorage:
    """Where the run keeps its record."""
    return storage_at(config.storage)


def storage_at(reference: str) -> RunStorage:
    """The storage that a config's `storage` names."""
    return _block(RunStorage, reference, url=reference)


def tracking_of(config: TrackedConfig) -> MLflowTracking:
    """Where the run logs its metrics."""
    return tracking_at(config.tracking, config.experiment)


def tracking_at(reference: str, experiment: str) -> MLflowTracking:
    """The server that a config's `tracking` names, and an experiment on it."""
    return _block(MLflowTracking, reference, tracking_uri=reference, experiment=experiment)


def _runs_its_own(base_url: str) -> bool:
    return base_url == "local" or (not base_url and not from_environment())


def _block(kind: type[B], reference: str, **fields: object) -> B:
    if not reference.startswith("block:"):
        return kind.model_validate(fields)
    name = reference.removeprefix("block:")
    try:
        block = kind.load(name)
    except ValueError as error:
        raise ConfigError(
            f"There is no saved {kind.get_block_type_slug()} block named {name!r}: "
            "run `prefect block register -m blocks` and create it in the Prefect UI."
        ) from error
    assert isinstance(block, kind)
    return block

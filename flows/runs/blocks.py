"""Blocks of a config: saved ones by `block:NAME`, others by their URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from blocks import MLflowTracking, RunStorage, TinkerService
from blocks.errors import ConfigError
from blocks.files.local import path_of
from blocks.own_servers import check_own_service, check_own_tracking
from blocks.servers.processes import LocalEngine, starting_engine
from blocks.service import is_set_in_environment
from flows.config.base import RunConfig, ServiceConfig, TrackedConfig
from flows.runs.prices import priced_models
from objectives.config.import_policy import is_restricted
from tasks.common.service_errors import TRANSIENT_ERRORS

B = TypeVar("B", bound=Block)

# Engines that `engine_ahead` has started. The run's first attempt takes its engine from the list; later ones start one.
_ENGINES_AHEAD: ContextVar[list[LocalEngine]] = ContextVar("engines_ahead")


@contextmanager
def open_service(config: ServiceConfig) -> Iterator[TinkerService]:
    """Open the Tinker service of a run; an engine that the run starts is stopped at the end.

    Raises:
        ConfigError: the model is one of the hosted service, and nothing selects a service; the config of a deployment
            names a service that the worker's environment does not name; or there is no saved block of the given name.
        ServiceError: the engine did not start.
    """
    if lacks_key(config.model, config.base_url):
        raise ConfigError(
            f"TINKER_API_KEY is missing, and {config.model} is a model of the hosted Tinker service: set the key, or "
            "set base_url to 'local' to train the model on this machine."
        )
    if _starts_engine(config.base_url):
        ahead = _ENGINES_AHEAD.get([])
        engine = nullcontext(ahead.pop()) if ahead else starting_engine(**_engine_options(config))
        with engine as started, started.serving() as service:
            yield service
    else:
        yield _service(config.base_url)


@contextmanager
def engine_ahead(config: RunConfig) -> Iterator[None]:
    """Start the engine of a run, if it needs one, before the run; `open_service` inside the block waits for it."""
    if not _starts_engine(config.base_url) or lacks_key(config.model, config.base_url):
        yield
        return
    with starting_engine(**_engine_options(config)) as engine:
        token = _ENGINES_AHEAD.set([engine])
        try:
            yield
        finally:
            _ENGINES_AHEAD.reset(token)


def _engine_options(config: ServiceConfig) -> dict[str, Any]:
    return {"model": config.model, **config.engine.model_dump()}


def lacks_key(model: str, base_url: str) -> bool:
    """Return whether a run of a hosted model has neither a base_url nor a service in the environment."""
    return not base_url and _starts_engine(base_url) and _is_hosted(model)


def _is_hosted(model: str) -> bool:
    """Return whether only the hosted service can have a model: it has a price, or a suffix such as `:peft:131072`."""
    return model in priced_models() or (":" in model and not ((path := path_of(model)) and path.exists()))


def service_at(base_url: str) -> TinkerService | None:
    """Return the service of a config's `base_url` without starting one; None if the run starts its own engine.

    Raises:
        ConfigError: the config of a deployment names a service that the worker's environment does not name, or there is
            no saved block of the given name.
    """
    return None if _starts_engine(base_url) else _service(base_url)


def _service(base_url: str) -> TinkerService:
    if is_restricted() and base_url and not _is_block(base_url):
        check_own_service(base_url)
    return _block(TinkerService, base_url, base_url=base_url or None)


def service_url(base_url: str) -> str:
    """Return the URL of the service of a config's `base_url`; empty if the run starts its own engine."""
    service = service_at(base_url)
    return service.resolved_url if service else ""


def storage_of(config: ServiceConfig) -> RunStorage:
    """Return the storage of a run's record."""
    return storage_at(config.storage)


def storage_at(reference: str) -> RunStorage:
    """Return the storage of a config's `storage` field.

    Raises:
        ConfigError: there is no saved block of the given name.
    """
    return _block(RunStorage, reference, url=reference)


def tracking_of(config: TrackedConfig) -> MLflowTracking:
    """Return the tracking server of a run."""
    return tracking_at(config.tracking, config.experiment)


def tracking_at(reference: str, experiment: str) -> MLflowTracking:
    """Return the tracking server of a config's `tracking` field; runs are logged to `experiment`.

    Raises:
        ConfigError: the config of a deployment names a server that the worker's environment does not name, or there is
            no saved block of the given name.
    """
    if is_restricted() and not _is_block(reference):
        check_own_tracking(reference)
    return _block(MLflowTracking, reference, tracking_uri=reference, experiment=experiment)


def _starts_engine(base_url: str) -> bool:
    return base_url == "local" or (not base_url and not is_set_in_environment())


def _is_block(reference: str) -> bool:
    return reference.startswith("block:")


def _block(kind: type[B], reference: str, **fields: object) -> B:
    """Return the saved block that `block:NAME` refers to; for another reference, a block with the given fields.

    Raises:
        ConfigError: there is no saved block of that name.
    """
    if not _is_block(reference):
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


def limit_name(service_url: str) -> str:
    """Name of a service's global concurrency limit.

    >>> limit_name("https://tinker.example.com/services/prod")
    'tinker:tinker.example.com'
    """
    return f"tinker:{urlsplit(service_url).netloc}"


@contextmanager
def service_slot(service_url: str) -> Iterator[None]:
    """Hold one slot of a service's concurrency limit; without a limit or a Prefect server, continue at once.

    Acquiring a slot takes about 50 ms, so a run acquires it once and not for every step.
    """
    slot = ExitStack()
    name = limit_name(service_url)
    with suppress(*TRANSIENT_ERRORS):
        if FlowRunContext.get() and _is_limited(name):
            get_run_logger().info("Waiting for a slot of %s.", name)
            slot.enter_context(concurrency(name, raise_on_lease_renewal_failure=False))
    try:
        yield
    finally:
        with suppress(*TRANSIENT_ERRORS):  # an unreleased slot expires
            slot.close()


def _is_limited(name: str) -> bool:
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(name).active
        except ObjectNotFound:
            return False

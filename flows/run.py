"""Everything a run holds open: its directory, its training client, its MLflow run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tinker
import torch
from tinker_cookbook.checkpoint_utils import CheckpointRecord, add_renderer_name_to_user_metadata

from blocks.errors import ServiceError, ServiceLostError, reason
from blocks.storage import RunDirectory
from flows.blocks_of import service_of, storage_of
from flows.config import RunConfig
from flows.fork import check_lineage, starts_of_fork
from flows.record import check_config, open_log
from flows.renderers import renderer_names
from flows.slot import slot_at
from tasks.checkpoint import resumable
from tasks.metrics import MetricsLog
from tasks.service_errors import service_errors


@dataclass(frozen=True, slots=True)
class Run:
    """An open run.

    Attributes:
        directory: where its record is kept.
        session: the session on the service.
        client: the training client, holding the weights of `start`.
        log: its MLflow run.
        start: the checkpoint it goes on from, another run's for a fork; None at its beginning.
        model: its base model, by the service's name.
    """

    directory: RunDirectory
    session: tinker.ServiceClient
    client: tinker.TrainingClient
    log: MetricsLog
    start: CheckpointRecord | None
    model: str

    @property
    def for_builders(self) -> dict[str, Any]:
        """What builders of data and environments may take of it, by the names of their parameters."""
        return {"session": self.session, "directory": self.directory, "base_model": self.model}


@contextmanager
def open_run(config: RunConfig, restarts: Sequence[str], *, lora_rank: int, seed: int) -> Iterator[Run]:
    """Open a run at its beginning or its last checkpoint; whatever was started for it is stopped at the end.

    Args:
        restarts: why it was opened again in this part of the run, noted in MLflow.

    Raises:
        ConfigError: the run name is in use by another config, or the service has no such model.
        ServiceError: the service or MLflow does not answer or refuses.
        StorageError: the run's directory cannot be used.
    """
    with _one_torch_thread(), storage_of(config).run_directory(config.run_name) as directory:
        records = resumable(directory)
        check_lineage(config, records)
        starts = records or starts_of_fork(config, storage_of(config))
        check_config(directory, config, records[0] if records else None, restarts)
        with service_of(config) as service:
            service.check_model(config.model)
            with (
                slot_at(service.resolved_url),
                open_log(service, config, directory, records, restarts) as log,
                service.session() as session,
            ):
                if starts:
                    client, start = _resumed_client(session, config, starts)
                else:
                    client, start = _new_client(session, config, lora_rank, seed), None
                yield Run(directory, session, client, log, start, config.model)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The terms' sums are small: beside a busy engine, handing them to other threads costs far more than the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _new_client(session: tinker.ServiceClient, config: RunConfig, lora_rank: int, seed: int) -> tinker.TrainingClient:
    with service_errors(f"create a training client for {config.model}"):
        return session.create_lora_training_client(
            config.model, rank=lora_rank, seed=seed, user_metadata=_metadata(config)
        ).result()


def _resumed_client(
    session: tinker.ServiceClient, config: RunConfig, records: Sequence[CheckpointRecord]
) -> tuple[tinker.TrainingClient, CheckpointRecord]:
    """A client at the newest checkpoint that the service still has, and that checkpoint."""
    gone: ServiceError | None = None
    for record in records:
        path = record.state_path or ""
        try:
            with service_errors(f"load the checkpoint {path}"):
                client = session.create_training_client_from_state_with_optimizer(path, user_metadata=_metadata(config))
                return client.result(), record
        except ServiceError as error:
            if not isinstance(error.__cause__, tinker.RequestFailedError | tinker.NotFoundError):
                raise
            print(f"{error} The one before it is tried.", file=sys.stderr)
            gone = error
    if gone is None or isinstance(gone, ServiceLostError):
        raise gone or AssertionError("unreachable: there is a record")
    raise ServiceError(
        f"The service has none of the {len(records)} checkpoints that {config.run_name!r} could start from (the last "
        f"one: {reason(gone.__cause__ or gone)}): choose another run_name to begin again, or another checkpoint for "
        "resume."
    ) from gone


def _metadata(config: RunConfig) -> dict[str, str]:
    metadata = {"tinker_flows_run": config.run_name}
    add_renderer_name_to_user_metadata(metadata, next(iter(renderer_names(config)), None))
    return metadata

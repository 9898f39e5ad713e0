"""Everything a run holds open: its directory, its training client, its MLflow run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tinker
import torch
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.storage import RunDirectory
from flows.blocks_of import service_of, storage_of, tracking_of
from flows.config import RunConfig
from flows.record import check_config, open_log
from tasks.checkpoint import last_resumable
from tasks.metrics import MetricsLog
from tasks.service_errors import service_errors


@dataclass(frozen=True, slots=True)
class Run:
    """An open run.

    Attributes:
        directory: where its record is kept.
        client: the training client, holding the weights of `start`.
        log: its MLflow run.
        start: the checkpoint it goes on from; None at its beginning.
    """

    directory: RunDirectory
    client: tinker.TrainingClient
    log: MetricsLog
    start: CheckpointRecord | None


@contextmanager
def open_run(config: RunConfig, *, lora_rank: int, seed: int) -> Iterator[Run]:
    """Open a run at its beginning or its last checkpoint; whatever was started for it is stopped at the end.

    Raises:
        ConfigError: the run name is in use by another config, or the service has no such model.
        ServiceError: the service or MLflow does not answer or refuses.
        StorageError: the run's directory cannot be used.
    """
    with _one_torch_thread(), storage_of(config).run_directory(config.run_name) as directory:
        start = last_resumable(directory)
        check_config(directory, config, start)
        with service_of(config) as service:
            service.check_model(config.model)
            with open_log(tracking_of(config), config, directory) as log, service.session() as session:
                yield Run(directory, _training_client(session, config, start, lora_rank, seed), log, start)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The terms' sums are small: beside a busy engine, handing them to other threads costs far more than the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _training_client(
    session: tinker.ServiceClient,
    config: RunConfig,
    start: CheckpointRecord | None,
    lora_rank: int,
    seed: int,
) -> tinker.TrainingClient:
    metadata = {"tinker_flows_run": config.run_name}
    if start is None:
        with service_errors(f"create a training client for {config.model}"):
            return session.create_lora_training_client(
                config.model, rank=lora_rank, seed=seed, user_metadata=metadata
            ).result()
    assert start.state_path is not None
    with service_errors(f"load the checkpoint {start.state_path}"):
        return session.create_training_client_from_state_with_optimizer(
            start.state_path, user_metadata=metadata
        ).result()

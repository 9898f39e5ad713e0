"""Open resources of a run: directory, service session, training client and MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import tinker
import torch
from prefect.task_runners import TaskRunner
from tinker_cookbook.checkpoint_utils import CheckpointRecord, add_renderer_name_to_user_metadata
from tinker_cookbook.tokenizer_utils import register_tokenizer

from blocks.errors import ServiceError, ServiceLostError, reason
from blocks.storage import RunDirectory
from blocks.terminal import print_notice
from flows.config.base import BuilderConfig, RunConfig, ServiceConfig
from flows.config.loader import renderer_names
from flows.config.train import AdapterSettings, TrainConfig
from flows.monitoring.system_metrics import system_metrics
from flows.runs.blocks import open_service, service_slot, storage_of
from flows.runs.start.config_record import check_config
from flows.runs.start.fork import FRESH_OPTIMIZER, check_lineage, starts_of
from flows.runs.task_runner import open_task_runner
from flows.runs.tracking.mlflow_run import open_log
from tasks.common.builders import takes
from tasks.common.event_loop import open_workers
from tasks.common.service_errors import service_errors
from tasks.common.tokenizers import lock_tokenizers
from tasks.training.checkpoints import resumable
from tasks.training.token_meter import TokenMeter
from tasks.training.tracking.metrics import MetricsLog


@dataclass(frozen=True, slots=True)
class Run:
    """Open run.

    Attributes:
        directory: Directory of the run's record.
        session: Session on the service.
        client: Training client, with the weights of `start`.
        log: MLflow run.
        start: Checkpoint that the run starts from: its own newest one, or that of `resume` or `init_from`; None for a
            new run of the base model.
        model: Base model by its name on the service.
        task_runner: Prefect task runner of the terms.
        meter: Counts the tokens of teachers, judges, reward models, generated data and evaluations, not of rollouts.
    """

    directory: RunDirectory
    session: tinker.ServiceClient
    client: tinker.TrainingClient
    log: MetricsLog
    start: CheckpointRecord | None
    model: str
    task_runner: TaskRunner[Any]
    meter: TokenMeter = field(default_factory=TokenMeter)

    @property
    def builder_arguments(self) -> dict[str, Any]:
        """Optional arguments of data and environment builders, by parameter name."""
        resources = {"session": self.session, "directory": self.directory, "base_model": self.model}
        return resources | {"token_meter": self.meter}


@contextmanager
def open_run(config: TrainConfig, restarts: Sequence[str], adapter: AdapterSettings) -> Iterator[Run]:
    """Open a run at its start or its last checkpoint; resources that it starts are stopped at the end.

    Args:
        restarts: Reasons of the restarts so far, recorded in MLflow.
        adapter: Settings of the adapter, if the run starts from the base model.

    Raises:
        ConfigError: The run name is in use with another config or with `resume: never`, the weights to start from do
            not exist, the task runner cannot be opened, or the service does not have the model.
        ServiceError: The service or MLflow does not respond or rejects a request.
        StorageError: The run's directory is not usable.
    """
    lock_tokenizers()
    with _one_torch_thread(), open_workers(), storage_of(config).run_directory(config.run_name) as directory:
        records = resumable(directory)
        check_lineage(config, records)
        starts = records or starts_of(config, storage_of(config))
        check_config(directory, config, records[0] if records else None, restarts)
        with open_task_runner(config.task_runner) as task_runner, open_service(config) as service:
            service.check_model(config.model)
            with (
                service_slot(service.resolved_url),
                open_log(service, config, directory, records, restarts) as log,
                system_metrics(log),
                service.session() as session,
            ):
                if starts:
                    client, start = _resumed_client(session, config, starts)
                else:
                    client, start = _new_client(session, config, adapter), None
                # Builders and evaluators open the tokenizer by the service's name of the model.
                register_tokenizer(config.model, client.get_tokenizer)
                yield Run(directory, session, client, log, start, config.model, task_runner)


@contextmanager
def open_builder_arguments(
    config: ServiceConfig,
    run_name: str,
    session: tinker.ServiceClient,
    field: str,
    data: BuilderConfig,
    meter: TokenMeter | None = None,
) -> Iterator[dict[str, Any]]:
    """Open the optional arguments of a data builder outside of a run.

    The directory is that of `run_name`; it is locked only if the builder takes it, as builders of generated data do.

    Args:
        meter: counts the tokens that the builder samples; None if nobody is charged for them.
    """
    directory = storage_of(config).run_directory(run_name)
    is_taken = takes(field, data.builder, data.params, "directory")
    with open_workers(), directory if is_taken else nullcontext():
        arguments = {"session": session, "directory": directory, "base_model": config.model}
        yield arguments | {"token_meter": meter or TokenMeter()}


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Use one torch thread for the terms: splitting small computations takes longer, and a local engine needs cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _new_client(session: tinker.ServiceClient, config: RunConfig, adapter: AdapterSettings) -> tinker.TrainingClient:
    with service_errors(f"create a training client for {config.model}"):
        return session.create_lora_training_client(config.model, **adapter, user_metadata=_metadata(config)).result()


def _resumed_client(
    session: tinker.ServiceClient, config: RunConfig, records: Sequence[CheckpointRecord]
) -> tuple[tinker.TrainingClient, CheckpointRecord]:
    """Return a client at the newest checkpoint that the service still has, with its record."""
    last_error: ServiceError | None = None
    for number, record in enumerate(records, start=1):
        path = record.state_path or ""
        try:
            with service_errors(f"load the checkpoint {path}"):
                load = (
                    session.create_training_client_from_state
                    if record.has(FRESH_OPTIMIZER)
                    else session.create_training_client_from_state_with_optimizer
                )
                return load(path, user_metadata=_metadata(config)).result(), record
        except ServiceError as error:
            # Not certain: a failing service may report these errors for a checkpoint that it still has.
            may_be_gone = isinstance(error.__cause__, tinker.RequestFailedError | tinker.NotFoundError)
            # A service may refuse to train sampler weights.
            is_refused = "/sampler_weights/" in path and isinstance(error.__cause__, tinker.BadRequestError)
            if not (may_be_gone or is_refused):
                raise
            if number < len(records):
                cause = reason(error.__cause__ or error)
                print_notice(f"The checkpoint {path} could not be loaded ({cause}). Trying the previous checkpoint.")
            last_error = error
    if last_error is None or isinstance(last_error, ServiceLostError):  # the run restarts and tries again
        raise last_error or AssertionError("unreachable: there is a record")
    raise ServiceError(
        f"The service could load none of the {len(records)} checkpoints that {config.run_name!r} can start from (last "
        f"error: {reason(last_error.__cause__ or last_error)}): choose another run_name to start over, or another "
        "checkpoint for resume or init_from."
    ) from last_error


def _metadata(config: RunConfig) -> dict[str, str]:
    metadata = {"tinker_flows_run": config.run_name}
    add_renderer_name_to_user_metadata(metadata, next(iter(renderer_names(config)), None))
    return metadata

"""The reference of a run: the base model, or a checkpoint, that terms such as `kl` and `dpo` measure from."""

from __future__ import annotations

from flows.run import Run
from flows.train_config import BASE_MODEL, TrainConfig
from tasks.checkpoint import resumable
from tasks.features import load_kept
from tasks.reference import REFERENCE_NAME, Reference
from tasks.service_errors import service_errors

# What the run started from.
START = "start"


def open_reference(run: Run, config: TrainConfig, *, keeps: bool = True) -> Reference:
    """The reference, with what the run kept of it.

    Args:
        keeps: whether the data comes again, and what is asked once is kept.

    Raises:
        ServiceError: the service has no such checkpoint, or does not answer.
    """
    name = _started_from(run) if config.reference == START else config.reference
    with service_errors(f"open the reference {name}"):
        if name == BASE_MODEL:
            # An adapter that was never trained adds nothing to the model it is on.
            client = run.session.create_lora_training_client(config.model, rank=config.lora_rank).result()
        else:
            client = run.session.create_training_client_from_state(name).result()
    reference = Reference(client, name, keeps=keeps)
    load_kept(reference.kept, run.directory, REFERENCE_NAME)
    return reference


def _started_from(run: Run) -> str:
    """The same for every part of a run: the record of a fork begins with its parent."""
    records = resumable(run.directory)
    first = records[-1] if records else run.start
    return first.extra["parent"]["state_path"] if first and first.has("parent") else BASE_MODEL

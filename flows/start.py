"""Where an open run starts: its beginning, a checkpoint of its own, of another run, or of tinker-cookbook's loop."""

from __future__ import annotations

from dataclasses import replace

from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from flows.cookbook_run import cookbook_step
from flows.run import Run
from flows.train_config import TrainConfig
from tasks.checkpoint import append_record, resumable, step_of


def begin(run: Run, config: TrainConfig, steps_per_epoch: int, num_steps: int) -> CheckpointRecord | None:
    """The checkpoint that the run goes on from, with its step; a fork is recorded as one, once.

    Raises:
        ConfigError: a fork would start at or behind its last step, or has an adapter of another rank.
    """
    start = run.start
    if start is None:
        return None
    if not start.has("step"):
        step = cookbook_step(run.directory, start, steps_per_epoch)
        return replace(start, extra={**start.extra, "step": step})
    if start.has("parent") and not resumable(run.directory):
        _check_fork(run, config, step_of(start), num_steps)
        return _record_fork(run, start, steps_per_epoch)
    return start


def first_step(directory: RunDirectory) -> int:
    """The step that a run began at: 0, or that of the checkpoint it was forked from."""
    records = resumable(directory)
    return step_of(records[-1]) if records and records[-1].has("parent") else 0


def _check_fork(run: Run, config: TrainConfig, step: int, num_steps: int) -> None:
    if step >= num_steps:
        raise ConfigError(
            f"resume is {config.resume!r}, at step {step}, and this run ends at step {num_steps}: give it more "
            "num_steps or num_epochs, or the tinker:// path of the checkpoint, which starts at step 0."
        )
    adapter = run.client.get_info()
    if adapter.lora_rank is not None and adapter.lora_rank != config.lora_rank:
        raise ConfigError(
            f"resume is {config.resume!r}, whose adapter has rank {adapter.lora_rank}, and lora_rank is "
            f"{config.lora_rank}: set lora_rank to {adapter.lora_rank}."
        )


def _record_fork(run: Run, start: CheckpointRecord, steps_per_epoch: int) -> CheckpointRecord:
    for key, value in start.extra["parent"].items():
        run.log.tag(f"tinker_flows.parent.{key}", str(value))
    run.log.flush()
    epoch, batch = divmod(step_of(start), steps_per_epoch)
    extra = {**start.extra, "mlflow_run_id": run.log.run_id}
    record = replace(start, epoch=epoch, batch=batch, extra=extra)
    append_record(run.directory, record.to_dict())
    return record

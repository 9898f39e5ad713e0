"""Start of a run: at step 0, at its own last checkpoint, or at the weights of its origin.

The origin is the checkpoint that a run is forked from, or that `init_from` names. tinker-cookbook may have written the
run's own last checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

import tinker
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from blocks.terminal import print_notice
from flows.config.train import TrainConfig
from flows.monitoring.run_tags import note_warning
from flows.runs.run import Run
from flows.runs.start.cookbook_compat import cookbook_step
from flows.runs.start.fork import check_end, check_model, named_origin
from tasks.common.service_errors import service_errors
from tasks.training.checkpoints import append_record, resumable, step_of
from tasks.training.tracking.metrics_file import read_metrics


def resolve_start(run: Run, config: TrainConfig, steps_per_epoch: int, num_steps: int) -> CheckpointRecord | None:
    """Return the checkpoint that the run starts from, with its step; None for a new run of the base model.

    The origin of a new run is recorded.

    Raises:
        ConfigError: A fork starts at or after its last step, or the weights have another base model, rank or trained
            layers.
        ServiceError: The service does not have the weights or does not respond.
    """
    start = run.start
    if start is None:
        return None
    if not start.has("step"):  # a record that tinker-cookbook wrote
        step = cookbook_step(run.directory, start, steps_per_epoch)
        return replace(start, extra={**start.extra, "step": step})
    if start.has("parent") and not resumable(run.directory):  # the first start of a run with an origin
        _check_origin(run, config, start, num_steps)
        return _record_origin(run, config, start, steps_per_epoch)
    return start


def restore_metrics(run: Run, start: CheckpointRecord | None, num_steps: int) -> None:
    """Copy the metrics of earlier steps to the MLflow run if its tracking store is new to the run, with a warning.

    `keep_best`, `promote_if` and the report compare all steps. The run logs the step of its checkpoint again, unless it
    is finished.

    Raises:
        ServiceError: MLflow did not store the metrics.
    """
    if start is None or start.get("mlflow_run_id", run.log.run_id) == run.log.run_id:
        return
    stop = step_of(start)
    if stop == num_steps:
        stop += 1
    steps = read_metrics(run.directory)
    missing = [step for step in sorted(steps) if step < stop and not run.log.has_logged(step)]
    if not missing:
        return
    for step in missing:
        run.log.log(step, steps[step])
    run.log.flush()
    text = (
        f"The tracking store does not have the MLflow run {start.extra['mlflow_run_id']}, to which this run logged "
        "before. It goes on in another MLflow run, with the earlier metrics from metrics.jsonl, but without the "
        "earlier tags, artifacts and logged models."
    )
    note_warning(run.log, "other_mlflow_run", text)


def origin_step(directory: RunDirectory) -> int:
    """Return the first step of a run: 0, or the step of the checkpoint that it was forked from."""
    records = resumable(directory)  # newest first: the origin is the oldest
    return step_of(records[-1]) if records and records[-1].has("parent") else 0


def _check_origin(run: Run, config: TrainConfig, start: CheckpointRecord, num_steps: int) -> None:
    """Check that a new run can start from the weights that its config names; see `resolve_start`."""
    check_end(config, step_of(start), num_steps)
    path = start.state_path or ""
    with service_errors(f"describe the checkpoint {path}"):
        weights = tinker.RestClient(run.session.holder).get_weights_info_by_tinker_path(path).result()
    check_model(config, weights.base_model)
    if weights.lora_rank is not None and weights.lora_rank != config.lora_rank:
        raise ConfigError(
            f"{named_origin(config)}, whose adapter has rank {weights.lora_rank}, but lora_rank is "
            f"{config.lora_rank}: set lora_rank to {weights.lora_rank}."
        )
    for layers in ("train_attn", "train_mlp", "train_unembed"):
        trained = getattr(weights, layers)
        if trained is not None and trained != getattr(config, layers):
            raise ConfigError(
                f"{named_origin(config)}, whose adapter has {layers} {trained}, but {layers} is "
                f"{getattr(config, layers)}: set it to {trained}."
            )


def _record_origin(run: Run, config: TrainConfig, start: CheckpointRecord, steps_per_epoch: int) -> CheckpointRecord:
    """Report the origin of a new run, and record it as the first line of the run's checkpoints.jsonl."""
    parent = start.extra["parent"]
    of_run = f", step {parent['step']} of the run {parent['run_name']}" if "run_name" in parent else ""
    text = f"{config.run_name} starts from {start.state_path}{of_run}."
    get_run_logger().info("%s", text)
    print_notice(text)
    for key, value in parent.items():
        run.log.tag(f"tinker_flows.parent.{key}", str(value))
    run.log.flush()
    epoch, batch = divmod(step_of(start), steps_per_epoch)
    # Not those of the parent: `resume: never` allows only a second start of the same flow run.
    own_flow_run = {"flow_run_id": flow_run.get_id(), "flow_run_count": flow_run.get_run_count()}
    extra = {**start.extra, "mlflow_run_id": run.log.run_id, **own_flow_run}
    record = replace(start, epoch=epoch, batch=batch, extra=extra)
    append_record(run.directory, record.to_dict())
    return record

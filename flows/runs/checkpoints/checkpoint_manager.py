"""Checkpoints of a run: saved and recorded while the next steps run, retained and promoted as configured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import tinker
from mlflow.exceptions import MlflowException
from prefect.assets import Asset
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import ServiceError, reason
from blocks.terminal import print_notice
from flows.config.base import RunConfig
from flows.config.promotion import PromoteIf
from flows.monitoring.events import emit
from flows.monitoring.run_tags import (
    APPROVAL_TAG,
    forget_approval,
    forget_rejection,
    forget_warning,
    note_difference,
    note_pending_approval,
    note_rejection,
    note_warning,
)
from flows.runs.blocks import tracking_of
from flows.runs.checkpoints.approval import ApprovalRequest, read_approval
from flows.runs.checkpoints.checkpoint_refs import checkpoint_key
from flows.runs.checkpoints.promotion import Measurement, describe_difference, find_rejection
from flows.runs.run import Run
from flows.runs.start.resume import origin_step
from tasks.common.assets import materialize
from tasks.common.service_errors import service_errors
from tasks.common.task import call
from tasks.reports.summary import storage_option
from tasks.reports.tables import held_out_rows, is_bookkeeping
from tasks.training.checkpoints import (
    Kind,
    PendingCheckpoint,
    enqueue_checkpoint,
    record_checkpoint,
    resumable,
    step_of,
)
from tasks.training.held_out import read_batch_values
from tasks.training.retention import KeepPolicy, count_candidates, keep_checkpoints
from tasks.training.tracking.logged_models import MODEL_ID, link_metrics
from tasks.training.tracking.metric_names import logged_name
from tasks.training.tracking.model_registry import Promotion, promote_from

# After an error, the service may not respond: leaving the context then waits for a pending save at most this long.
LAST_WAIT_S = 10.0
_NO_BEST = "no_best"
# Metrics in the metadata of a checkpoint's asset.
_SHOWN_METRICS = ("loss/total", "train_mean_nll", "test/nll", "test/accuracy", "env/all/reward/total")


class Checkpoints:
    """Checkpoints of an open run; at most one save is pending, and leaving the context waits for it.

    Attributes:
        state_step: Step of the newest requested save that has the optimizer state.
        rejection: Reason why `finish` promoted no checkpoint; empty if it did, or without `register_as`.
        approval_request: Question that a person has to answer before `finish` promotes a checkpoint; None without one.
    """

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        steps_per_epoch: int,
        start: CheckpointRecord | None,
        data: Sequence[Asset] = (),
    ) -> None:
        """Open the checkpoints of a run.

        Args:
            start: the checkpoint that the run starts from.
            data: the data of the run, from which its checkpoints derive.
        """
        self._run, self._config, self._steps_per_epoch, self._data = run, config, steps_per_epoch, data
        self._rest = tinker.RestClient(run.session.holder)
        best = config.keep_best
        self._policy = KeepPolicy(
            config.keep_last,
            logged_name(best.metric) if best else "",
            best.mode if best else "min",
            config.ttl_seconds,
        )
        self._last = start
        self.state_step = step_of(start) if start else 0
        self._origin = {"tinker_flows.run_name": config.run_name, "tinker.base_model": config.model}
        self.rejection = ""
        self.approval_request: ApprovalRequest | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._recording: Future[CheckpointRecord] | None = None
        # An earlier process may have been killed after it recorded this checkpoint and before it linked the metrics.
        if start and (model_id := self._model_of(start)):
            self._thread.submit(copy_context().run, self._link_metrics, step_of(start), model_id)

    def enqueue(self, step: int, *, final: bool, kind: Kind) -> PendingCheckpoint:
        """Request a save of the weights after `step` steps, whose updates have all been requested."""
        ttl_seconds = self._config.ttl_seconds
        if final or kind != "sampler":
            self.state_step = step
        self._run.log.expect_model(step)
        return enqueue_checkpoint(
            self._run.client, step, self._steps_per_epoch, kind=kind, final=final, ttl_seconds=ttl_seconds
        )

    def record(self, pending: PendingCheckpoint, state: Mapping[str, Any]) -> None:
        """Record a save in the background, with what a resumed run needs besides the weights.

        First waits for the previous save.

        Raises:
            ServiceError, StorageError: The previous save failed.
        """
        self.wait()
        self._recording = self._thread.submit(copy_context().run, self._record, pending, state)

    def raise_if_failed(self) -> None:
        """Raise the error of a finished save, without waiting."""
        if self._recording and self._recording.done():
            self.wait()

    def wait(self) -> CheckpointRecord | None:
        """Wait for the pending save; return the newest record, or None without a checkpoint.

        Raises:
            ServiceError, StorageError: The save failed.
        """
        recording, self._recording = self._recording, None
        if recording:
            self._last = recording.result()
        return self._last

    def finish(self) -> CheckpointRecord:
        """Wait for the final checkpoint and return its record.

        Retention runs once more: an earlier process may have been killed after it recorded the final checkpoint, and a
        finished run may have started again with other settings. With `register_as`, promote the best checkpoint, or
        the final one without `keep_best`, unless `promote_if` or a person rejects it.

        Raises:
            ServiceError, StorageError: A save failed, or it is unknown which checkpoint to promote.
        """
        last = self.wait()
        assert last is not None
        if name := self._config.register_as:
            with tracking_of(self._config).failures():
                best = self._keep()
            self._warn_without_best(best)
            candidate = best or last
            self._run.directory.check_writer()
            self.rejection = self._rejection(candidate) or self._refusal(name, candidate)
            if self.approval_request:
                note_pending_approval(self._run.log, self.rejection)
            elif self.rejection:
                note_rejection(self._run.log, self._config.run_name, name, self.rejection)
            else:
                self._promote(name, candidate)
                forget_rejection(self._run.log)
        else:
            self._try_to_keep("start the same command again to delete them")
        return last

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
            elif self._recording:
                with suppress(TimeoutError):
                    self._recording.exception(timeout=LAST_WAIT_S)
        finally:
            self._thread.shutdown(wait=False)

    def _record(self, pending: PendingCheckpoint, state: Mapping[str, Any]) -> CheckpointRecord:
        key = checkpoint_key(self._run.directory.location, pending.name)
        task = materialize(record_checkpoint, key, self._data, self._describe)
        record = call(task, pending, self._run.directory, self._run.log, state, self._origin)
        self._emit(record)
        self._try_to_keep("the run tries again at its next checkpoint and at its end")
        return record

    def _try_to_keep(self, remedy: str) -> None:
        try:
            self._keep()
        except (ServiceError, MlflowException) as failure:
            cause = reason(failure.__cause__ or failure)
            print_notice(f"Old checkpoints could not be deleted ({cause}); {remedy}.")

    def _keep(self) -> CheckpointRecord | None:
        """Delete old checkpoints; return the best one, or None without `keep_best` or without one."""
        if not (self._policy.last or self._policy.metric):
            return None
        return call(keep_checkpoints, self._rest, self._run.directory, self._run.log, self._policy)

    def _warn_without_best(self, best: CheckpointRecord | None) -> None:
        """Warn that `keep_best` selected no checkpoint for `register_as`; remove the warning of an earlier start."""
        if not self._policy.metric or best:
            forget_warning(self._run.log, _NO_BEST)
            return
        text = (
            f"No checkpoint has a value of keep_best.metric, {self._policy.metric}, so register_as takes the final "
            "checkpoint: set it to a metric that is measured at the steps of checkpoints."
        )
        note_warning(self._run.log, _NO_BEST, text)

    def _emit(self, record: CheckpointRecord) -> None:
        """Emit the event of a new checkpoint, with the settings that a receiver needs to find it."""
        places = {name: getattr(self._config, name) for name in ("base_url", "storage", "tracking", "experiment")}
        step = step_of(record)
        message = f"{self._config.run_name} saved a checkpoint at step {step}."
        payload = {"step": step, "checkpoint": f"{self._config.run_name}@{step}", "is_final": record.final, **places}
        emit("checkpoint", self._config.run_name, {**payload, "message": message})

    def _promote(self, name: str, record: CheckpointRecord) -> None:
        parent = {f"tinker_flows.parent.{key}": str(value) for key, value in self._parent().items()}
        alias = "final" if record.final else "best"
        origin = {**self._origin, **parent}
        promoted = Promotion(alias, step_of(record), record.state_path or "", origin, self._model_of(record))
        key = checkpoint_key(self._run.directory.location, record.name)
        promote_from(key, self._run.log, name, promoted, lambda: self._for_sampling(record))

    def _model_of(self, record: CheckpointRecord) -> str:
        """Return the ID of a checkpoint's logged model; empty if this MLflow run has none."""
        return str(record.get(MODEL_ID, "")) if record.get("mlflow_run_id", "") == self._run.log.run_id else ""

    def _link_metrics(self, step: int, model_id: str) -> None:
        try:
            link_metrics(self._run.log, step, model_id)
        except (MlflowException, ServiceError) as error:
            print_notice(f"The metrics of step {step} are missing in its logged model: {reason(error)}.")

    def _describe(self, record: CheckpointRecord) -> dict[str, Any]:
        """Return the metadata of a checkpoint as a Prefect asset."""
        paths = {"state_path": record.state_path, "sampler_path": record.sampler_path}
        origin = {"mlflow_run_id": self._run.log.run_id, "digest_of_datums": record.get("contents", {}).get("datums")}
        known = {"step": step_of(record), **paths, **origin, **self._metrics_of(step_of(record))}
        return {name: value for name, value in known.items() if value is not None}

    def _metrics_of(self, step: int) -> dict[str, float | str]:
        """Return the main metrics of the weights before a step, from the last update and the last evaluation."""
        metrics: dict[str, float | str] = {}
        try:
            for name in _SHOWN_METRICS:
                last = step if name.startswith("test/") else step - 1
                values = [value for at, value in self._run.log.values(name).items() if at <= last]
                metrics |= {name: values[-1]} if values else {}
        except MlflowException as error:  # the checkpoint itself is saved and recorded
            metrics["metrics"] = f"unknown, because MLflow did not answer ({reason(error)})"
        return metrics

    def _rejection(self, record: CheckpointRecord) -> str:
        """Return why `promote_if` rejects a checkpoint; empty if it does not.

        The difference from the baseline is reported in either case.
        """
        if not self._config.promote_if:
            return ""
        metric, step = PromoteIf.parse(self._config.promote_if).metric, step_of(record)
        self._run.log.flush()
        values, stored = self._run.log.values(metric), read_batch_values(self._run.directory)
        checkpoint, baseline = (
            Measurement(values.get(at), stored.get(at, {}).get(metric))
            for at in (step, origin_step(self._run.directory))
        )
        selected_by = self._policy.metric
        num = max(count_candidates(self._run.directory, self._run.log.values(selected_by)), 1) if selected_by else 1
        note_difference(self._run.log, describe_difference(self._config.promote_if, checkpoint, baseline, num))
        rejection = find_rejection(self._config.promote_if, self._config.promote_confidence, checkpoint, baseline, num)
        return f"The checkpoint at step {step} is not promoted: {rejection}." if rejection else ""

    def _refusal(self, name: str, record: CheckpointRecord) -> str:
        """Return the reason why a person has not approved the promotion; empty if it is approved or needs no approval.

        Without a decision, set `approval_request` to the question.
        """
        if not self._config.needs_approval:
            forget_approval(self._run.log)
            return ""
        step, directory = step_of(record), self._run.directory
        history = {
            key: [point for point in points if point[0] <= step] for key, points in self._run.log.history().items()
        }
        rows = tuple(
            row for row in held_out_rows(history, read_batch_values(directory)) if not is_bookkeeping(row.metric)
        )
        question = f"Register the checkpoint at step {step} of {self._config.run_name} as a version of {name}?"
        request = ApprovalRequest(self._config.run_name, step, record.state_path or "", question, rows)
        approval = read_approval(directory, request)
        if approval is None:
            self.approval_request = request
            forget_approval(self._run.log)
            command = f"tinker-flows resume {shlex.quote(self._config.run_name)}"
            command += storage_option(self._config.run_name, directory.location)
            return (
                f"The checkpoint at step {step} is not promoted: it waits for approval, in the Prefect UI if the flow "
                f"run is suspended, or else in a terminal with `{command}`."
            )
        self._run.log.tag(APPROVAL_TAG, approval.describe())
        if approval.decision == "approve":
            return ""
        return f"The checkpoint at step {step} is not promoted: {approval.describe_refusal()}."

    def _parent(self) -> dict[str, Any]:
        """Return the origin of a fork, from its first record; empty for other runs."""
        return resumable(self._run.directory)[-1].get("parent", {})

    def _for_sampling(self, record: CheckpointRecord) -> str:
        if record.sampler_path:
            return record.sampler_path
        with service_errors(f"load the checkpoint {record.state_path}"):
            client = self._run.session.create_training_client_from_state(record.state_path or "").result()
        with service_errors(f"save the checkpoint {record.state_path} for sampling"):
            return client.save_weights_for_sampler("best").result().path

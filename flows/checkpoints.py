"""A run's checkpoints: asked for behind an update, recorded while the next steps run, kept as the config says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import tinker
from mlflow.exceptions import MlflowException
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import ServiceError
from flows.config import RunConfig
from flows.promote_if import PromoteIf
from flows.refused import forget_refusal, note_refusal
from flows.run import Run
from tasks.checkpoint import PendingCheckpoint, enqueue_checkpoint, read_records, record_checkpoint, resumable, step_of
from tasks.keep import KeepPolicy, keep_checkpoints
from tasks.options import call
from tasks.promote import Promoted, promote
from tasks.service_errors import service_errors

# After a failure the service may never answer; what it saved before is worth a moment.
LAST_WAIT_S = 10.0


class Checkpoints:
    """The checkpoints of an open run; at most one save is waited for at a time, and the block's end waits for it.

    Attributes:
        refused: after `finish`, why none was promoted; empty where one was, or nobody asked.
    """

    def __init__(self, run: Run, config: RunConfig, steps_per_epoch: int, start: CheckpointRecord | None) -> None:
        self._run, self._config, self._steps_per_epoch = run, config, steps_per_epoch
        self._rest = tinker.RestClient(run.session.holder)
        best = config.keep_best
        self._policy = KeepPolicy(
            config.keep_last, best.metric if best else "", best.mode if best else "min", config.ttl_seconds
        )
        self._last = start
        self.refused = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._recording: Future[CheckpointRecord] | None = None

    def enqueue(self, step: int, *, final: bool) -> PendingCheckpoint:
        """Ask for a save of the weights as they are after every update asked for, which are `step`."""
        return enqueue_checkpoint(
            self._run.client, step, self._steps_per_epoch, final=final, ttl_seconds=self._config.ttl_seconds
        )

    def record(self, pending: PendingCheckpoint, state: Mapping[str, Any]) -> None:
        """Record a save once it is done, with the state of all else; returns at once, unless one is still under way.

        Raises:
            ServiceError, StorageError: the one before it could not be saved or recorded.
        """
        self.settle()
        self._recording = self._thread.submit(copy_context().run, self._record, pending, state)

    def check(self) -> None:
        """Raise what went wrong with a save that has ended; does not wait."""
        if self._recording and self._recording.done():
            self.settle()

    def settle(self) -> CheckpointRecord | None:
        """Wait for the save under way; returns the newest record, None where there is none.

        Raises:
            ServiceError, StorageError: it could not be saved or recorded.
        """
        recording, self._recording = self._recording, None
        if recording:
            self._last = recording.result()
        return self._last

    def finish(self) -> CheckpointRecord:
        """Wait for the final checkpoint, and promote the best one, or else it, where the config says so."""
        last = self.settle()
        assert last is not None
        if name := self._config.register_as:
            records = read_records(self._run.directory)
            best = records.best.get("best") if self._policy.metric else None
            chosen = next((each for each in records.checkpoints if each.state_path == best), last)
            self.refused = self._refusal(chosen)
            if self.refused:
                note_refusal(self._run.log, self._config.run_name, name, self.refused)
            else:
                self._promote(name, chosen)
                forget_refusal(self._run.log)
        return last

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.settle()
            elif self._recording:
                with suppress(TimeoutError):
                    self._recording.exception(timeout=LAST_WAIT_S)
        finally:
            self._thread.shutdown(wait=False)

    def _record(self, pending: PendingCheckpoint, state: Mapping[str, Any]) -> CheckpointRecord:
        record = call(record_checkpoint, pending, self._run.directory, self._run.log, state)
        if self._policy.last or self._policy.metric:
            try:
                call(keep_checkpoints, self._rest, self._run.directory, self._run.log, self._policy)
            except (ServiceError, MlflowException) as failure:
                print(f"{failure} It is tried again with the next checkpoint.", file=sys.stderr)
        return record

    def _promote(self, name: str, record: CheckpointRecord) -> None:
        parent = {f"tinker_flows.parent.{key}": str(value) for key, value in self._parent().items()}
        lineage = {"tinker_flows.run_name": self._config.run_name, "tinker.base_model": self._config.model, **parent}
        alias = "final" if record.final else "best"
        promoted = Promoted(alias, step_of(record), record.state_path or "", lineage)
        promote(self._run.log, name, promoted, lambda: self._for_sampling(record))

    def _refusal(self, record: CheckpointRecord) -> str:
        if not self._config.promote_if:
            return ""
        gate = PromoteIf.parse(self._config.promote_if)
        self._run.log.flush()
        values = self._run.log.values(gate.metric)
        baseline = values[min(values)] if values else None
        refusal = gate.refusal(values.get(step_of(record)), baseline)
        return f"The checkpoint at step {step_of(record)} is not promoted: {refusal}." if refusal else ""

    def _parent(self) -> dict[str, Any]:
        """What the run was forked from: its first record; empty where it was not."""
        return resumable(self._run.directory)[-1].get("parent", {})

    def _for_sampling(self, record: CheckpointRecord) -> str:
        if record.sampler_path:
            return record.sampler_path
        with service_errors(f"load the checkpoint {record.state_path}"):
            client = self._run.session.create_training_client_from_state(record.state_path or "").result()
        with service_errors(f"save the checkpoint {record.state_path} for sampling"):
            return client.save_weights_for_sampler("best").result().path

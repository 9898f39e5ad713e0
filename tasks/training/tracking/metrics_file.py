"""metrics.jsonl of a run: one line per step in tinker-cookbook's format, written alongside MLflow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from blocks.errors import StorageError
from blocks.storage import RunDirectory
from tasks.common.jsonl import read_jsonl
from tasks.training.tracking.metric_names import logged_name

METRICS_NAME = "metrics.jsonl"

# The pause after a write, as a multiple of its duration: an append to S3 rewrites the whole file.
_PAUSE_PER_WRITE = 10
_SHORTEST_PAUSE_S = 0.5


class MetricsFile:
    """Lines `{"step": ..., metric: value, ...}`, appended by a background thread.

    A resumed run repeats the steps from its first step on. Its first write removes the lines of these steps, and a torn
    line, so that each step has one line. A checkpoint is recorded only after all earlier lines are durable.
    """

    def __init__(self, directory: RunDirectory, first: int) -> None:
        """Open the file for the steps from `first` on; nothing is read or written before the first of them."""
        self._directory, self._first = directory, first
        self._is_cut = False
        self._unwritten: list[str] = []
        self._writer: threading.Thread | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._pause_s, self._wrote_at = _SHORTEST_PAUSE_S, -_SHORTEST_PAUSE_S

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step without waiting; fast steps share a write."""
        numbers = {key: value if type(value) is int else float(value) for key, value in metrics.items()}
        with self._lock:
            # `step` comes first in the line and overrides a metric of that name.
            self._unwritten.append(json.dumps({"step": step, **numbers} | {"step": step}))
        is_busy = self._writer is not None and self._writer.is_alive()
        if not is_busy and time.monotonic() - self._wrote_at >= self._pause_s:
            self._writer = threading.Thread(target=self._try_to_write, name="metrics-file", daemon=True)
            self._writer.start()

    def flush(self) -> None:
        """Wait until all lines logged so far are durable.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except StorageError:
            return  # `flush` tries again and raises the error

    def _write(self) -> None:
        with self._writing:  # one write at a time, so that lines stay in the order of the steps
            with self._lock:
                lines, self._unwritten = self._unwritten, []
            if not lines:
                return
            began = time.monotonic()
            try:
                self._cut()
                self._directory.append_line(METRICS_NAME, "\n".join(lines))
            except StorageError:
                with self._lock:
                    self._unwritten = [*lines, *self._unwritten]
                raise
            self._wrote_at = time.monotonic()
            self._pause_s = max(_SHORTEST_PAUSE_S, _PAUSE_PER_WRITE * (self._wrote_at - began))

    def _cut(self) -> None:
        """Remove the lines of the steps that run again, once."""
        if not self._is_cut and (content := self._directory.read_bytes(METRICS_NAME)):
            earlier_lines = [
                line for line in read_jsonl(self._directory, METRICS_NAME, _with_step) if line["step"] < self._first
            ]
            lines = "".join(f"{json.dumps(line)}\n" for line in earlier_lines).encode()
            if lines != content:
                self._directory.write_bytes(METRICS_NAME, lines)
        self._is_cut = True


def read_metrics(directory: RunDirectory) -> dict[int, dict[str, float]]:
    """Read the metrics of each step, by their names in MLflow; empty without the file.

    Lines of tinker-cookbook may have other names, and values that are no numbers, which are left out.
    """
    return {
        int(line["step"]): {
            logged_name(key): float(value)
            for key, value in line.items()
            if key != "step" and isinstance(value, int | float)
        }
        for line in read_jsonl(directory, METRICS_NAME, _with_step)
    }


def _with_step(line: dict[str, Any]) -> dict[str, Any]:
    int(line["step"])  # a line without a step cannot be attributed to one
    return line

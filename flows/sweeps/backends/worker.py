"""Run a trial on a worker of a Dask or Ray cluster, in a subprocess.

Stop requests are signals, which only a main thread receives. The trial is started with `subprocess`, because workers
are often daemonic processes, which cannot have children of `multiprocessing`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import BinaryIO

import cloudpickle
from prefect.context import hydrated_context, serialize_context

from flows.config.flow_lookup import SweptConfig, find_flow
from flows.monitoring.drain import deliver_events
from flows.runs.cli import silence_console_logs
from flows.sweeps.backends.process import run_to_outcome
from flows.sweeps.protocols import TrialOutcome

# Prefixes of the environment variables that a run reads; the worker keeps its other variables.
_SENT = ("AWS_", "MLFLOW_", "PREFECT_", "TINKER_")


def pack_trial(flow: str, config: SweptConfig) -> bytes:
    """Serialize a trial for `run_on_worker`, as a child of the current flow run."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_SENT)}
    return cloudpickle.dumps((environment, serialize_context(), flow, config))


def run_on_worker(packed: bytes) -> TrialOutcome:
    """Run a trial to its end, in a subprocess that ends with this process."""
    command = [sys.executable, "-m", "flows.sweeps.backends.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(packed).to_bytes(8, "little") + packed)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # reported below by its exit status
        result = process.stdout.read()
        process.stdin.close()
    if not result:
        why = f"The trial's process exited with status {process.returncode}: check the memory and the worker's log."
        return TrialOutcome("failed", why, True)
    return cloudpickle.loads(result)


def _serve(source: BinaryIO, result: BinaryIO) -> None:
    environment, context, flow, config = cloudpickle.loads(source.read(int.from_bytes(source.read(8), "little")))
    threading.Thread(target=_exit_with, args=(source,), daemon=True).start()
    os.environ.update(environment)
    silence_console_logs()
    with hydrated_context(context):
        outcome = run_to_outcome(partial(find_flow(flow).flow, config, return_state=True))
    deliver_events()
    cloudpickle.dump(outcome, result)
    result.flush()


def _exit_with(source: BinaryIO) -> None:
    """Exit when the input closes, because the worker then has ended."""
    source.read(1)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not mix with the result
    _serve(sys.stdin.buffer, result)
    os._exit(0)  # without waiting for background threads

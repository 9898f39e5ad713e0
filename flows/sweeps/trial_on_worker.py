"""A trial on a worker of a Dask or Ray cluster: `run_on_worker` is the call, which has a process of its own run it.

A process, because a run is asked to stop by signals, which only a main thread hears. It is none of `multiprocessing`,
because workers are often daemons, which may have no such children.
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

from flows.command_line import keep_prefect_off_the_terminal
from flows.config import RunConfig
from flows.find_flow import find_flow
from flows.recorded import deliver_events
from flows.sweeps.trial_process import End, end_of

# What a run reads where it is; all else is the worker's own.
_SENT = ("AWS_", "MLFLOW_", "PREFECT_", "TINKER_")


def pack_trial(flow: str, config: RunConfig) -> bytes:
    """A trial as a child of the flow run under way, for `run_on_worker`."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_SENT)}
    return cloudpickle.dumps((environment, serialize_context(), flow, config))


def run_on_worker(packed: bytes) -> End:
    """Run a trial to its end, in a process that ends with this one."""
    command = [sys.executable, "-m", "flows.sweeps.trial_on_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(packed).to_bytes(8, "little") + packed)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it says why below
        answer = process.stdout.read()
        process.stdin.close()
    if not answer:
        why = (
            f"Its process ended with status {process.returncode}: look for too little memory, and in the worker's log."
        )
        return End("failed", why, True)
    return cloudpickle.loads(answer)


def _serve(told: BinaryIO, answer: BinaryIO) -> None:
    environment, context, flow, config = cloudpickle.loads(told.read(int.from_bytes(told.read(8), "little")))
    threading.Thread(target=_end_with, args=(told,), daemon=True).start()
    os.environ.update(environment)
    keep_prefect_off_the_terminal()
    with hydrated_context(context):
        end = end_of(partial(find_flow(flow).flow, config, return_state=True))
    deliver_events()
    cloudpickle.dump(end, answer)
    answer.flush()


def _end_with(told: BinaryIO) -> None:
    """Nothing more is ever told: this ends with the worker, however that does."""
    told.read(1)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed
    _serve(sys.stdin.buffer, answer)
    os._exit(0)  # whatever threads are left wait for nothing

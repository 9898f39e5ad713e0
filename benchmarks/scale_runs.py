"""Concurrent sft runs in the threads of one process: ``python -m benchmarks.scale_runs CONFIG.yaml FIRST NUM``.

The runs are named `run-FIRST` and so on, and start one after another, because Prefect on SQLite answers 503 if many
start at once. The process exits with an error as soon as one run fails.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.runs.cli import silence_console_logs
from flows.sft import sft

START_EVERY_S = 3.0


def _main(path: Path, first: int, num_runs: int) -> None:
    silence_console_logs()
    configs = [load_config(SftConfig, path, [f"run_name=run-{first + index}"]) for index in range(num_runs)]

    def start(index: int) -> None:
        time.sleep(index * START_EVERY_S)
        sft(configs[index])

    with ThreadPoolExecutor(num_runs) as threads:
        for run in as_completed([threads.submit(start, index) for index in range(num_runs)]):
            if error := run.exception():
                traceback.print_exception(error)
                os._exit(1)  # the other threads would go on


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

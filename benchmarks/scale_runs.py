"""Concurrent sft runs in the threads of one process: ``python -m benchmarks.scale_runs CONFIG.yaml FIRST NUM``.

The runs are named `run-FIRST` and so on. The process exits with an error as soon as one run fails.
"""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.runs.cli import silence_console_logs
from flows.sft import sft


def _main(path: Path, first: int, num_runs: int) -> None:
    silence_console_logs()
    configs = [load_config(SftConfig, path, [f"run_name=run-{first + index}"]) for index in range(num_runs)]
    with ThreadPoolExecutor(num_runs) as threads:
        for run in as_completed([threads.submit(sft, config) for config in configs]):
            if error := run.exception():
                traceback.print_exception(error)
                os._exit(1)  # the other threads would go on


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Demo: examples/sft.yaml on the local engine; resumes an earlier demo that was stopped.

python -m examples.demo [num_steps=3] [field=value ...]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from flows.runs.config_record import changed_fields
from tasks.training.checkpoints import resumable
from tinker_flows import RunStorage, SftConfig, exit_on_error, load_config, run, sft, show_result

CONFIG = Path(__file__).with_name("sft.yaml")


def next_run(overrides: list[str]) -> SftConfig:
    """Return the config under the first demo name that is unused or belongs to an unfinished run of the same config."""
    steps = next((override.partition("=")[2] for override in overrides if override.startswith("num_steps=")), "all")
    for number in itertools.count(1):
        name = f"demo-{steps}-steps" + (f"-{number}" if number > 1 else "")
        config = load_config(SftConfig, CONFIG, [f"run_name={name}", "base_url=local", *overrides])
        directory = RunStorage.model_validate({"url": config.storage}).run_directory(name)
        records = resumable(directory)
        if not records or not (records[0].final or changed_fields(directory, config)):
            return config
    raise AssertionError("unreachable: count() never ends")


if __name__ == "__main__":
    exit_on_error(lambda: show_result(run(sft, next_run(sys.argv[1:]))))

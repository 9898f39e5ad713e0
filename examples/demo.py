"""The demo: examples/sft.yaml on the local engine, going on where an earlier demo was stopped.

python -m examples.demo [num_steps=3] [field=value ...]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from blocks import RunStorage
from flows.command_line import exit_with_a_sentence, run, show_result
from flows.config_file import load_config
from flows.record import changed_fields
from flows.sft import SftConfig, sft
from tasks.checkpoint import resumable

CONFIG = Path(__file__).with_name("sft.yaml")


def next_run(overrides: list[str]) -> SftConfig:
    """The demo's config under the first of its names that is new or was stopped on the way with this same config."""
    steps = next((each.partition("=")[2] for each in overrides if each.startswith("num_steps=")), "all")
    for number in itertools.count(1):
        name = f"demo-{steps}-steps" + (f"-{number}" if number > 1 else "")
        config = load_config(SftConfig, CONFIG, [f"run_name={name}", "base_url=local", *overrides])
        directory = RunStorage.model_validate({"url": config.storage}).run_directory(name)
        records = resumable(directory)
        if not records or not (records[0].final or changed_fields(directory, config)):
            return config
    raise AssertionError("unreachable: there are endless numbers")


if __name__ == "__main__":
    exit_with_a_sentence(lambda: show_result(run(sft, next_run(sys.argv[1:]))))

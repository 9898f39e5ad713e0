"""The demo: examples/sft.yaml on the local engine, going on where an earlier demo was stopped.

python -m examples.demo [num_steps=3] [field=value ...]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from blocks import RunStorage
from flows.command_line import main
from flows.sft import SftConfig, sft
from tasks.checkpoint import last_resumable


def next_run_name(base: str) -> str:
    """The first of `base`, `base-2`, `base-3` ... that is not finished: a stopped demo is gone on with."""
    storage = RunStorage()
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}-{number}"
        with storage.run_directory(name) as directory:
            last = last_resumable(directory)
        if last is None or not last.final:
            return name
    raise AssertionError("unreachable: there are endless numbers")


if __name__ == "__main__":
    overrides = sys.argv[1:]
    steps = next((each.partition("=")[2] for each in overrides if each.startswith("num_steps=")), "all")
    config = str(Path(__file__).with_name("sft.yaml"))
    name = next_run_name(f"demo-{steps}-steps")
    main(sft, SftConfig, ["--config", config, f"run_name={name}", "base_url=local", *overrides])

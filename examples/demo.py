"""Demo: examples/sft.yaml on the local engine, compared with a stored run without its terms.

An earlier demo that was stopped is resumed.

python -m examples.demo [num_steps=3] [field=value ...]
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from deployments.run_lookup import report_of
from flows.runs.start.config_record import changed_fields
from tasks.reports.tables import Control, Estimate, HeldOutRow
from tasks.training.checkpoints import resumable
from tasks.training.held_out import BatchValues
from tinker_flows import RunStorage, SftConfig, exit_on_error, load_config, run, sft, show_result

CONFIG = Path(__file__).with_name("sft.yaml")
CONTROL = Path(__file__).parent / "data" / "demo_control.json"


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
        print(f"{name} has ended or has other settings, so this is a new run; see also `tinker-flows report {name}`")
    raise AssertionError("unreachable: count() never ends")


def read_control() -> dict[str, Control]:
    """Return the held-out values of the demo without its terms, which `python -m benchmarks demo_control` stored."""
    entries = json.loads(CONTROL.read_text())["held_out"]
    return {
        name: Control(Estimate.of(batches := BatchValues(**entry)), batches)
        if "values_B" in entry
        else Control(Estimate(**entry))
        for name, entry in entries.items()
    }


def describe_control() -> str:
    """Say in a sentence where the stored control comes from."""
    stored = json.loads(CONTROL.read_text())
    return (
        f"The control is a stored run with seed {stored['seed']}, which {stored['command']} made at commit "
        f"{stored['commit'][:7]}."
    )


def describe_nll(rows: Sequence[HeldOutRow], control: Mapping[str, Control]) -> str:
    """Return how the NLL of right solutions and of corrupted ones differs from the control; empty if it is unknown.

    Each right solution of the held-out data is followed by its corrupted copy.
    """
    measured = next((row.batches for row in rows if row.metric == "nll"), None)
    if measured is None or not measured.is_paired_with(control["nll"].batches):
        return ""
    assert control["nll"].batches
    effects = measured.minus(control["nll"].batches).values_B
    right, corrupted = (f"{fmean(effects[start::2]):+.2g}" for start in (0, 1))
    return f"nll: {right} on the right solutions, {corrupted} on their corrupted copies, which are half of the data"


def main(overrides: list[str]) -> None:
    """Run the demo and show what its terms changed."""
    config, control = next_run(overrides), read_control()
    result = run(sft, config)
    if not overrides:
        split = describe_nll(result.held_out, control)
        effect = f"{describe_control()} {f'Effect on the {split}.' if split else ''}".rstrip()
        report_of(result.run_name, config.storage, rebuild=True, control=control, effect=effect)
    show_result(result, None if overrides else control)
    if overrides:
        print("control      none: the values without the terms are stored for the whole demo only, `make demo`")
    else:
        print(
            "control      a stored run with the same seed and the weight 0 for all terms; effect: after minus control"
        )
        print("             logic, topology, confidence: lower is better; a term may also change another one's value")
        print(f"             {describe_nll(result.held_out, control)}")
    if shutil.which("tinker-flows") is None:
        command = os.path.relpath(Path(sys.executable).with_name("activate"))
        print(f"shell        source {command}   # finds the command tinker-flows")
    changes = " ".join(["run_name=without-logic", *overrides, "objective.regularizers.logic.weight=0"])
    print(
        "next         see what logic alone did: train without it; expect a higher value of logic, and compare both runs"
    )
    print(f"             tinker-flows run sft --config {os.path.relpath(CONFIG)} {changes}")
    print(f"             tinker-flows report {result.run_name} without-logic")


if __name__ == "__main__":
    exit_on_error(lambda: main(sys.argv[1:]))

"""The demo and its control, the same run with the weight 0 for every term.

Writes the control's held-out values, which the demo prints beside its own, and the picture in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.scratch import scratch_home
from blocks.storage import RunStorage
from examples.demo import CONFIG, CONTROL
from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.runs.cli import run
from flows.runs.result import TrainResult
from flows.sft import sft
from tasks.reports.tables import Estimate, held_out_table
from tasks.training.held_out import read_batch_values

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "terms.png"
PANELS = {"logic": "logic: false arithmetic", "topology": "topology: disconnected reasoning"}


def demo_config() -> SftConfig:
    """Return the config of the demo."""
    return load_config(SftConfig, CONFIG, ["run_name=demo", "base_url=local"])


def control_config() -> SftConfig:
    """Return the demo's config with the weight 0 for every term, so that terms are measured and do not train."""
    weights = [f"objective.regularizers.{term.name}.weight=0" for term in demo_config().objective.regularizers]
    return load_config(SftConfig, CONFIG, ["run_name=demo-control", "base_url=local", *weights])


def measure() -> Table:
    """Run the demo and its control; return their held-out values."""
    with scratch_home():
        results = {"with the terms": run(sft, demo_config()), "without the terms": run(sft, control_config())}
        draw(results, PICTURE)
    write_control(results["without the terms"], CONTROL)
    table = Table(title="demo_control: held-out values of the demo and of its control", title_justify="left")
    for name, result in results.items():
        columns, rows = held_out_table(result.held_out)
        if not table.columns:
            for column in ("run", *columns):
                table.add_column(column, justify="left" if column in ("run", columns[0]) else "right")
        for row in rows:
            table.add_row(name, *row)
    return table


def write_control(result: TrainResult, path: Path) -> None:
    """Write the held-out values of a finished control."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    values = {row.metric: asdict(row.batches) if row.batches else {"value": row.after.value} for row in result.held_out}
    control = {
        "command": "python -m benchmarks demo_control",
        "commit": commit,
        "seed": control_config().seed,
        "num_steps": result.num_steps,
        "held_out": values,
    }
    path.write_text(json.dumps(control, indent=2) + "\n")


def draw(results: Mapping[str, TrainResult], path: Path) -> None:
    """Draw the change of the terms on held-out problems over the steps, with 95 % intervals, one line per run."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=150)
    for axes, (term, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for (name, result), color in zip(results.items(), ("#0072b2", "#999999"), strict=True):
            storage = RunStorage(url=result.directory.removesuffix(f"/{result.run_name}"))
            batches = read_batch_values(storage.run_directory(result.run_name))
            changes = [Estimate.of(values[term].minus(batches[0][term])) for values in batches.values()]
            means, bars = [change.value for change in changes], [change.half_width for change in changes]
            axes.errorbar(list(batches), means, bars, label=name, color=color, marker="o", capsize=3)
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(title=title, xlabel="step", ylabel="change since step 0")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left")
    figure.savefig(path)

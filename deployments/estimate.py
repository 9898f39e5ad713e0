"""What a run will take, as a table for the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.config_file import load_config
from flows.dpo import DpoConfig
from flows.estimate import Estimate, estimate
from flows.sft import SftConfig


def show_estimate(method: str, config: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print what the run of a config will take, by sft or dpo."""
    config_type = DpoConfig if method == "dpo" else SftConfig
    estimated = estimate(load_config(config_type, config, overrides))
    if as_json:
        print(json.dumps(asdict(estimated), indent=2))
        return
    table = Table(title=f"{estimated.run_name} on {estimated.model}", title_justify="left", show_header=False)
    for name, value in _rows(estimated):
        table.add_row(name, value)
    Console(highlight=False, soft_wrap=True).print(table)


def _rows(found: Estimate) -> list[tuple[str, str]]:
    mean = "" if found.batches_read == found.batches_of_epoch else f", by {found.batches_read:,} batches of"
    tokens = f"{found.num_tokens:,}{mean}{f' {found.batches_of_epoch:,}' if mean else ''}"
    held_out = f" over {found.num_held_out_tokens:,} held-out tokens" if found.num_evaluations else ""
    return [
        ("steps", f"{found.num_steps:,}"),
        ("tokens in their batches", tokens),
        ("forward passes", f"{found.num_forwards:,}"),
        ("forward_backward passes", f"{found.num_forward_backwards:,}"),
        ("evaluations", f"{found.num_evaluations:,}{held_out}"),
        ("tokens in all passes", f"{found.num_train_tokens:,}"),
        ("cost", "unknown: set budget.prices" if found.usd is None else f"${found.usd:,.4g}"),
        ("time", f"{_hours(found.hours)} at the pace of {found.paced_by}" if found.hours else _NO_PACE),
    ]


_NO_PACE = "unknown: MLflow has no earlier run of this model"


def _hours(hours: float) -> str:
    seconds = round(hours * 3600)
    return f"{seconds // 3600} h {seconds % 3600 // 60} min" if seconds >= 3600 else f"{seconds / 60:.1f} min"

"""Estimate of a run's cost and time, printed as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from blocks.console import TextConsole
from flows.config.dpo import DpoConfig
from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.estimate import Estimate, estimate


def show_estimate(method: str, config: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print the estimate for a config of the method `sft` or `dpo`."""
    config_type = DpoConfig if method == "dpo" else SftConfig
    run_estimate = estimate(load_config(config_type, config, overrides))
    if as_json:
        print(json.dumps(asdict(run_estimate), indent=2))
        return
    table = Table(title=f"{run_estimate.run_name} on {run_estimate.model}", title_justify="left", show_header=False)
    for name, value in _rows(run_estimate):
        table.add_row(name, value)
    TextConsole().print(table)


def _rows(run: Estimate) -> list[tuple[str, str]]:
    is_extrapolated = run.batches_read != run.batches_of_epoch
    sample = f" (extrapolated from {run.batches_read:,} of {run.batches_of_epoch:,} batches)" if is_extrapolated else ""
    held_out = f" over {run.num_held_out_tokens:,} held-out tokens" if run.num_evaluations else ""
    unknown_time = "unknown: MLflow has no earlier run of this method and model"
    return [
        ("steps", f"{run.num_steps:,}"),
        ("tokens in training batches", f"{run.num_tokens:,}{sample}"),
        ("forward passes", f"{run.num_forwards:,}"),
        ("forward_backward passes", f"{run.num_forward_backwards:,}"),
        ("evaluations", f"{run.num_evaluations:,}{held_out}"),
        *(
            [("tokens sampled, at most", f"{num_sampled:,}")]
            if (num_sampled := run.candidates.num_sample_tokens + run.examples.num_sample_tokens)
            else []
        ),
        *(
            [("tokens scored by the reference", f"{run.reference.num_prefill_tokens:,}")]
            if run.reference.num_prefill_tokens
            else []
        ),
        ("tokens in all passes", f"{run.num_train_tokens:,}"),
        ("cost", "unknown: set budget.prices" if run.usd is None else f"${run.usd:,.4g}"),
        ("time", f"{_format_hours(run.hours)} at the pace of run {run.paced_by}" if run.hours else unknown_time),
    ]


def _format_hours(hours: float) -> str:
    seconds = round(hours * 3600)
    return f"{seconds // 3600} h {seconds % 3600 // 60} min" if seconds >= 3600 else f"{seconds / 60:.1f} min"

"""Estimate of a run's cost and time, printed as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from blocks.console import TextConsole
from flows.config.distill import OnPolicyConfig, SelfConfig
from flows.config.dpo import DpoConfig
from flows.config.loader import load_config
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.estimate import Estimate, estimate
from flows.estimate_rollouts import RolloutEstimate, estimate_rollouts

_SAMPLING = {"rl": RlConfig, "on_policy_distillation": OnPolicyConfig, "self_distillation": SelfConfig}


def show_estimate(method: str, config: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print the estimate for a config of a method."""
    if method in _SAMPLING:
        sampled = estimate_rollouts(load_config(_SAMPLING[method], config, overrides))
        fields, rows = asdict(sampled), _rollout_rows(sampled)
    else:
        run = estimate(load_config(DpoConfig if method == "dpo" else SftConfig, config, overrides))
        fields, rows = asdict(run), _rows(run)
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    title = f"{fields['run_name']} on {fields['model']}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    TextConsole().print(table)


def _rollout_rows(run: RolloutEstimate) -> list[tuple[str, str]]:
    def between(low: float, high: float, form: str = ",") -> str:
        return format(low, form) if low == high else f"{low:{form}} to {high:{form}}"

    low, high = run.low, run.high
    usd = "unknown: set budget.prices"
    if low.usd is not None and high.usd is not None:
        usd = f"${between(low.usd, high.usd, ',.4g')}"
    prefill = between(low.sampled.num_prefill_tokens, high.sampled.num_prefill_tokens)
    return [
        ("steps", f"{run.num_steps:,}"),
        ("tokens in all passes", between(low.num_train_tokens, high.num_train_tokens)),
        ("prompt tokens", prefill),
        ("sampled tokens", between(low.sampled.num_sample_tokens, high.sampled.num_sample_tokens)),
        ("cost", usd),
        ("source", f"cost per step of run {run.like}" if run.like else "completions of 1 to rollout.max_tokens tokens"),
        *([("not included", "; ".join(run.excluded))] if run.excluded else []),
    ]


def _rows(run: Estimate) -> list[tuple[str, str]]:
    is_extrapolated = run.batches_read != run.batches_of_epoch
    sample = f" (extrapolated from {run.batches_read:,} of {run.batches_of_epoch:,} batches)" if is_extrapolated else ""
    held_out = f" over {run.num_held_out_tokens:,} held-out tokens" if run.num_evaluations else ""
    unknown_time = "unknown: MLflow has no earlier run of this method and model"
    return [
        ("steps", f"{run.num_steps:,}{_skipped(run.skipped_steps)}"),
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


def _skipped(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    verb, more = ("is", "") if len(steps) == 1 else ("are", ", ...")
    return f", of which {len(steps)} {verb} skipped for lack of anything to train (step {steps[0]}{more})"


def _format_hours(hours: float) -> str:
    seconds = round(hours * 3600)
    return f"{seconds // 3600} h {seconds % 3600 // 60} min" if seconds >= 3600 else f"{seconds / 60:.1f} min"

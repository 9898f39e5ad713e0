"""Estimate of a run's cost and time, printed as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from blocks.terminal import TextConsole
from flows.config.distill import OffPolicyConfig, OnPolicyConfig, PromptConfig, SelfConfig
from flows.config.dpo import DpoConfig
from flows.config.loader import load_config
from flows.config.rl import RlConfig
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.estimates.costs import CostEstimate, TokenCosts
from flows.estimates.evaluation import estimate_evaluation
from flows.estimates.rlhf import RlhfEstimate, estimate_rlhf
from flows.estimates.rollouts import estimate_rollouts
from flows.estimates.supervised import Estimate, estimate
from flows.estimates.teacher_data import estimate_teacher_data
from flows.evaluate import EvaluateConfig
from tasks.reports.summary import format_hours

AnyEstimate = Estimate | CostEstimate | RlhfEstimate


def _estimate_of(method: str, config: Path, overrides: Sequence[str]) -> AnyEstimate:
    sampling = {"rl": RlConfig, "on_policy_distillation": OnPolicyConfig, "self_distillation": SelfConfig}
    of_teachers = {"off_policy_distillation": OffPolicyConfig, "prompt_distillation": PromptConfig}
    if method in sampling:
        return estimate_rollouts(load_config(sampling[method], config, overrides))
    if method in of_teachers:
        return estimate_teacher_data(load_config(of_teachers[method], config, overrides))
    if method == "rlhf":
        return estimate_rlhf(load_config(RlhfConfig, config, overrides))
    if method == "evaluate":
        return estimate_evaluation(load_config(EvaluateConfig, config, overrides))
    return estimate(load_config(DpoConfig if method == "dpo" else SftConfig, config, overrides))


def show_estimate(method: str, config: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print the estimate for a config of a method."""
    result = _estimate_of(method, config, overrides)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    if not isinstance(result, RlhfEstimate):
        _show(result, "evaluated checkpoints" if method == "evaluate" else "steps")
        return
    for stage in result.stages.values():
        _show(stage)
    console = TextConsole()
    sums = _usd(result.usd_low, result.usd_high)
    console.print(f"{result.run_name}, all stages: {sums}; a supervised stage adds its estimate to both bounds")


def _show(run: Estimate | CostEstimate, unit: str = "steps") -> None:
    table = Table(title=f"{run.run_name} on {run.model}", title_justify="left", show_header=False)
    for name, value in _rows(run) if isinstance(run, Estimate) else _cost_rows(run, unit):
        table.add_row(name, value)
    TextConsole().print(table)


def _cost_rows(run: CostEstimate, unit: str) -> list[tuple[str, str]]:
    low, high = run.low, run.high
    return [
        (unit, f"{run.num_steps:,}{_from(run.first_step)}"),
        ("tokens in passes", _between(low.num_train_tokens, high.num_train_tokens)),
        ("prompt tokens", _between(low.sampled.num_prefill_tokens, high.sampled.num_prefill_tokens)),
        ("sampled tokens", _between(low.sampled.num_sample_tokens, high.sampled.num_sample_tokens)),
        *((f"  {part}", _part(bounds.low, bounds.high)) for part, bounds in run.parts.items()),
        ("cost", _usd(low.usd, high.usd)),
        ("source", _source(run)),
        *([("not included", "; ".join(run.excluded))] if run.excluded else []),
    ]


def _source(run: CostEstimate) -> str:
    if not run.like:
        completions = "completions of 1 to max_tokens tokens"
        if not 0 < run.num_measured < run.num_steps:
            return completions
        steps = f"{run.num_measured:,} steps" if run.num_measured > 1 else "step"
        return f"{completions}; the prompts of all steps are assumed to be like those of the first {steps}"
    steps = f" ({run.like_num_steps:,} step{'s' if run.like_num_steps > 1 else ''})" if run.like_num_steps else ""
    return f"cost of run {run.like}{steps}"


def _part(low: TokenCosts, high: TokenCosts) -> str:
    counts = {
        "in passes": (low.num_train_tokens, high.num_train_tokens),
        "prompt": (low.sampled.num_prefill_tokens, high.sampled.num_prefill_tokens),
        "sampled": (low.sampled.num_sample_tokens, high.sampled.num_sample_tokens),
    }
    shown = [f"{_between(*bounds)} {name}" for name, bounds in counts.items() if bounds[1]]
    return ", ".join([*shown, *([_usd(low.usd, high.usd)] if high.usd is not None else [])])


def _usd(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unknown: set budget.prices"
    return f"${_between(low, high, ',.4g')}"


def _between(low: float, high: float, form: str = ",") -> str:
    return format(low, form) if low == high else f"{low:{form}} to {high:{form}}"


def _rows(run: Estimate) -> list[tuple[str, str]]:
    # Later epochs repeat the batches of the first.
    num_different = min(run.num_steps - len(run.skipped_steps), run.batches_of_epoch)
    is_extrapolated = run.batches_read < num_different
    sample = f" (extrapolated from {run.batches_read:,} of {num_different:,} batches)" if is_extrapolated else ""
    held_out = f" over {run.num_held_out_tokens:,} held-out tokens" if run.num_evaluations else ""
    unknown_time = "unknown: MLflow has no earlier run of this method and model"
    num_sampled = (run.candidates + run.examples + run.evaluators).num_sample_tokens
    # Samples may be shorter than their limit. Only candidates are trained on.
    passes_bound = ", at most" if run.candidates.num_sample_tokens else ""
    cost_bound = "at most " if num_sampled and run.usd else ""
    return [
        ("steps", f"{run.num_steps:,}{_from(run.first_step)}{_skipped(run.skipped_steps)}"),
        ("tokens in training batches", f"{run.num_tokens:,}{sample}"),
        ("forward passes, which train nothing", f"{run.num_forwards:,}"),
        ("forward_backward passes, which train", f"{run.num_forward_backwards:,}"),
        ("evaluations", f"{run.num_evaluations:,}{held_out}"),
        *([("tokens sampled, at most", f"{num_sampled:,}")] if num_sampled else []),
        *(
            [("tokens scored by the reference", f"{run.reference.num_prefill_tokens:,}")]
            if run.reference.num_prefill_tokens
            else []
        ),
        (f"tokens in passes{passes_bound}", f"{run.num_train_tokens:,}"),
        ("cost", "unknown: set budget.prices" if run.usd is None else f"{cost_bound}${run.usd:,.4g}"),
        ("time", f"{format_hours(run.hours)} at the pace of run {run.paced_by}" if run.hours else unknown_time),
        *([("not included", "; ".join(run.excluded))] if run.excluded else []),
    ]


def _from(first_step: int) -> str:
    return f" (from step {first_step:,})" if first_step else ""


def _skipped(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    verb, more = ("is", "") if len(steps) == 1 else ("are", ", ...")
    return f", of which {len(steps)} {verb} skipped for lack of anything to train (step {steps[0]}{more})"

"""Decision to promote a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

from tinker_cookbook.eval.evaluators import Evaluator

from blocks.errors import ConfigError
from flows.config.promotion import PromoteIf
from tasks.evaluation.evaluators import ConfiguredEvaluator, ScoringEvaluator
from tasks.evaluation.intervals import (
    detectable_difference,
    difference_interval,
    num_problems_needed,
    sign_flip_p_value,
)
from tasks.training.held_out import BatchValues
from tasks.training.tracking.metric_names import logged_name


class Measurement(NamedTuple):
    """Measured value of the metric that `promote_if` names.

    Attributes:
        value: the metric; None if it was not measured.
        scores: score of each problem; None if the metric has none.
    """

    value: float | None
    scores: BatchValues | None


def check_scores(
    promote_if: str | None,
    confidence: float | None,
    evaluators: Sequence[Evaluator | ConfiguredEvaluator],
    held_out: Collection[str] = (),
) -> None:
    """Check for `promote_confidence` that the metric of `promote_if` has a score for each problem.

    Args:
        held_out: names of metrics that held-out data will score; the data is opened only after this check.

    Raises:
        ConfigError: The metric has no such scores.
    """
    if not promote_if or confidence is None:
        return
    metric = PromoteIf.parse(promote_if).metric
    entries = [entry.evaluator if isinstance(entry, ConfiguredEvaluator) else entry for entry in evaluators]
    scoring = [entry for entry in entries if isinstance(entry, ScoringEvaluator)]
    known = [logged_name(name) for entry in scoring for name in entry.scored_metrics] + [*held_out]
    if metric not in known:
        raise ConfigError(
            f"promote_confidence needs a metric with a score for each problem, but promote_if names {metric}: use "
            f"{' or '.join(known) or 'an evaluator that grades answers'}, or remove promote_confidence."
        )


def find_rejection(
    promote_if: str | None,
    confidence: float | None,
    checkpoint: Measurement,
    baseline: Measurement,
    num_candidates: int = 1,
) -> str:
    """Return the reason not to promote a checkpoint; empty if it meets the condition, or without a condition.

    If the checkpoint is the best of several, the level of the test is divided by their number (Bonferroni), which is
    valid however the scores of the checkpoints depend on each other. The reason then states the p-value times their
    number.

    Args:
        confidence: confidence with which the checkpoint must be better than the baseline; None to compare the values
            alone.
        num_candidates: number of checkpoints among which the checkpoint was chosen by a metric.
    """
    if not promote_if:
        return ""
    gate = PromoteIf.parse(promote_if)
    if rejection := gate.rejection(checkpoint.value, baseline.value):
        return rejection
    if confidence is None:
        return ""
    if not (checkpoint.scores and baseline.scores):
        return f"{gate.metric} has no score for each problem"
    if not checkpoint.scores.is_paired_with(baseline.scores):
        if checkpoint.scores.digest == baseline.scores.digest != "":
            return f"an earlier version stored the scores of {gate.metric} in another form; evaluate the baseline again"
        return f"{gate.metric} of the checkpoint and of the baseline were measured on different problems"
    sign = 1 if gate.sign in (">", ">=") else -1
    differences = [sign * difference for difference in checkpoint.scores.minus(baseline.scores).weighted_S]
    level = (1 - confidence) / num_candidates
    p_value = sign_flip_p_value(differences, level)
    # A p-value is a quotient of counts: allow for its rounding.
    if p_value <= level + 1e-12:
        return ""
    factors = ""
    if num_candidates > 1:
        factors = f" ({p_value:.3g} times the {num_candidates} checkpoints that keep_best compared)"
    return (
        f"{gate.metric} is better than that of the baseline by {fmean(differences):.3g} on {len(differences)} "
        f"problems, which happens by chance with a probability of {min(num_candidates * p_value, 1.0):.3g}{factors}, "
        f"but promote_confidence {confidence:g} allows at most {1 - confidence:.3g}: {_advice(differences, level)}"
    )


def describe_difference(
    promote_if: str, checkpoint: Measurement, baseline: Measurement, num_candidates: int = 1
) -> str:
    """Describe the difference of a condition's metric from the baseline and its uncertainty; empty if it is unknown.

    Args:
        num_candidates: number of checkpoints among which the checkpoint was chosen by a metric.
    """
    metric = PromoteIf.parse(promote_if).metric
    if checkpoint.value is None or baseline.value is None:
        return ""
    text = f"{metric} of the checkpoint minus that of the baseline is {checkpoint.value - baseline.value:.3g}"
    if not (checkpoint.scores and baseline.scores and checkpoint.scores.is_paired_with(baseline.scores)):
        return f"{text}, without an interval, because the two have no scores of the same problems."
    paired = checkpoint.scores.minus(baseline.scores)
    interval = difference_interval(paired.weighted_S, error=paired.mean()[1])
    detectable = detectable_difference(paired.weighted_S)
    text += " (no interval" if interval is None else f" (95 % interval {interval.low:.3g} to {interval.high:.3g}"
    smallest = (
        "no difference is detectable" if detectable is None else f"smallest detectable difference {detectable:.3g}"
    )
    text += f"; {smallest} with {paired.num_samples} problems)."
    if num_candidates > 1:
        text += f" This ignores that keep_best chose among {num_candidates} checkpoints."
    return text


def _advice(differences: Sequence[float], level: float) -> str:
    """Return the advice to a user whose checkpoint is not significantly better than the baseline."""
    if len(differences) < (num_needed := num_problems_needed(level)):
        return f"no result on {len(differences)} problems can meet it; use at least {num_needed} problems"
    detectable = detectable_difference(differences, level)
    if detectable is None:
        return "use more problems"
    return f"use more problems; with these, a true difference of {detectable:.3g} is found in 80 % of cases"

"""Tables of results, saved as Prefect artifacts and MLflow tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self

import numpy as np
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run

from objectives.term import BASE
from objectives.term_weights.targets import TargetSpec
from tasks.common.proportions import Interval, proportion_interval, t_quantile
from tasks.common.task import retried_task
from tasks.reports.html import artifact_key, escape_markdown
from tasks.training.held_out import BatchValues
from tasks.training.tracking.metrics import MetricsLog

Rows = Sequence[Sequence[Any]]
# Points (step, value) of each metric, in the order of the steps.
History = Mapping[str, Sequence[tuple[int, float]]]


@retried_task(name="report")
def write_table(log: MetricsLog, kind: str, run_name: str, columns: Sequence[str], rows: Rows, note: str = "") -> None:
    """Save a table as `<kind>.json` in MLflow and as the artifact `<kind>-<run name>` in Prefect, below a note."""
    log.client.log_table(log.run_id, _by_column(columns, rows), f"{kind}.json")
    if flow_run.get_id():
        table = [dict(zip(columns, row, strict=True)) for row in rows]
        description = f"{kind} of {escape_markdown(run_name)}" + (f". {escape_markdown(note)}" if note else "")
        create_table_artifact(table, artifact_key(kind, run_name), description=description)


def write_samples(log: MetricsLog, columns: Sequence[str], rows: Rows) -> None:
    """Save sampled answers as `samples.json` in MLflow."""
    log.client.log_table(log.run_id, _by_column(columns, rows), "samples.json")


def _by_column(columns: Sequence[str], rows: Rows) -> dict[str, list[Any]]:
    return {column: [row[index] for row in rows] for index, column in enumerate(columns)}


def format_figure(figure: float, sign: str = "") -> str:
    """Format a metric with four digits; one that differs from 0 by no more than float32 rounds is `≈0`.

    Args:
        sign: `+` to show the sign of a positive figure.

    >>> format_figure(0.07414159), format_figure(2.384e-08), format_figure(0.0, "+"), format_figure(0.25, "+")
    ('0.07414', '≈0', '+0', '+0.25')
    """
    return "≈0" if 0 < abs(figure) < _ROUNDING else f"{figure:{sign}.4g}"


@dataclass(frozen=True, slots=True)
class TermRow:
    """Metrics of one term; `grad_share` is its share of the sum of all gradient norms. An unknown figure is NaN."""

    name: str
    value: float
    weight: float
    contribution: float
    grad_share: float
    cosine_to_base: float


_FIELDS = ("value", "weight", "contribution", "grad_share", "cosine_to_base")
_SUMMED_FIELDS = ("contribution", "grad_share")
COLUMNS = ("term", "value", "weight", "contribution", "share of gradient", "cosine to base")


def term_rows(metrics: Mapping[str, float]) -> list[TermRow]:
    """Rows of the terms in `term/<name>/...` metrics, the base loss first."""
    names = sorted({key.split("/")[1] for key in metrics if key.startswith("term/") and key.endswith("/weight")})
    names.sort(key=lambda name: name != "base")
    return [TermRow(name, *(metrics.get(f"term/{name}/{field}", math.nan) for field in _FIELDS)) for name in names]


def recent_term_rows(history: History) -> tuple[str, list[TermRow]]:
    """Return a title, and rows of the terms with means over the last quarter of the steps, but at least four steps.

    A single batch says little about a term: its scores may be equal on all of its completions. Contributions and shares
    count 0 at steps that do not evaluate the term, so that they add up to the loss and to 1. Other means are over the
    steps that evaluate it, and the mean cosine over those at which it has a gradient.
    """
    points = {key: dict(steps) for key, steps in history.items() if key.startswith("term/")}
    steps = sorted({step for key, values in points.items() if key.endswith("/weight") for step in values})
    recent = steps[-max(4, len(steps) // 4) :]
    metrics: dict[str, float] = {}
    for key, values in points.items():
        name, _, field = key.removeprefix("term/").rpartition("/")
        shares = points.get(f"term/{name}/grad_share", {})
        used = [step for step in recent if step in values and (field != "cosine_to_base" or shares.get(step) != 0)]
        if field == "weight":
            used = used or [max(values)]  # a term that was skipped in these steps keeps its row
        if used and field in _FIELDS:
            num = len(recent) if field in _SUMMED_FIELDS else len(used)
            metrics[key] = math.fsum(values[step] for step in used) / num
    which = f"all {len(steps)}" if len(recent) == len(steps) else f"the last {len(recent)}"
    title = f"terms, means over {which} steps" if len(steps) > 1 else "terms at the only step"
    return title, term_rows(metrics)


def format_row(row: TermRow) -> tuple[str, ...]:
    """Text cells of a row, in the order of `COLUMNS`."""
    figures = (row.value, row.weight, row.contribution, row.grad_share, row.cosine_to_base)
    forms: tuple[Callable[[float], str], ...] = (
        *(format_figure, "{:.4g}".format, format_figure),
        *("{:.1%}".format, "{:+.3f}".format),
    )
    cells = ("-" if math.isnan(figure) else form(figure) for figure, form in zip(figures, forms, strict=True))
    return (row.name, *cells)


def term_table(rows: Sequence[TermRow]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Columns and text cells of the terms; for the base loss alone, without columns that compare it with terms.

    >>> term_table([TermRow("base", 1.5, 1.0, 1.5, 1.0, 1.0)])
    (('term', 'value'), [('base', '1.5')])
    """
    num_columns = len(COLUMNS) if len(rows) > 1 or any(row.name != BASE for row in rows) else 2
    return COLUMNS[:num_columns], [format_row(row)[:num_columns] for row in rows]


def cosine_key(first: str, second: str) -> str:
    """Metric key of the cosine of two terms; the run logs it for one of the two orders."""
    return f"term/{second}/cosine_to_base" if first == BASE else f"cosine/{first}/{second}"


HELD_OUT = "test/"
_VALUE, _ERROR = "/value", "/stderr"
REWARD = "env/all/reward/total"
ACCURACY, MARGIN = "test/accuracy", "test/margin"
# Margins are differences of sums of logprobs, so a margin of 0 may be a rounding error.
TIED = 1e-5
# Figures of float32 numbers near 1 that are smaller than this are rounding errors.
_ROUNDING = 1e-7
# Main metrics of sft, of preference data and of rl, which tables show first.
_HEADLINES = ("test/nll", ACCURACY, f"test/{REWARD}")
# Metrics of tinker-cookbook for every environment.
_COUNTS = {f"total_{name}" for name in ("episodes", "turns", "ac_tokens", "ob_tokens")} | {
    *("ac_tokens_per_turn", "ob_tokens_per_turn", "turns_per_episode")
}
# Held-out metrics of the methods next to their headlines.
_SIDE_METRICS = frozenset(["nll_per_token", "bits_per_byte", "dpo_loss", "chosen_reward", "rejected_reward"])


@dataclass(frozen=True, slots=True)
class Estimate:
    """Measured value with its 95 % interval.

    Attributes:
        half_width: half of a symmetric interval; NaN if it is unknown.
        bounds: interval of a share, which is not symmetric; None for other values.
    """

    value: float
    half_width: float = float("nan")
    bounds: Interval | None = None

    @classmethod
    def of(cls, batches: BatchValues, *, is_share: bool = False) -> Self:
        """Mean over held-out batches or problems, with the interval of Student's t, because they may be few.

        An accuracy has Wilson's interval. Other values have none if all are equal, which says nothing about their
        spread.

        Args:
            is_share: whether the values are of an accuracy; see `is_share`. Values outside 0 to 1, as earlier versions
                stored for groups of pairs, have the interval of other values.

        >>> Estimate.of(BatchValues([1.0, 3.0], [4, 4]))
        Estimate(value=2.0, half_width=12.706..., bounds=None)
        >>> str(Estimate.of(BatchValues([1.0] * 40, [1] * 40), is_share=True))
        '1 (0.91 to 1)'
        """
        mean, stderr = batches.mean()
        if is_share and all(0 <= value <= 1 for value in batches.values_B):
            return cls(mean, bounds=proportion_interval(batches.values_B, batches.num_datums_B))
        if batches.is_constant:
            return cls(mean)
        return cls(mean, t_quantile(max(1, batches.num_samples - 1), 0.975) * stderr)

    @property
    def has_interval(self) -> bool:
        return self.bounds is not None or not np.isnan(self.half_width)

    @property
    def errors(self) -> tuple[float, float] | None:
        """Distances from the value to both ends of the interval; None if it is unknown."""
        if self.bounds:
            return max(self.value - self.bounds.low, 0.0), max(self.bounds.high - self.value, 0.0)
        return None if np.isnan(self.half_width) else (self.half_width, self.half_width)

    def __str__(self) -> str:
        """Value, with its interval if that is known, both rounded to two digits of the interval.

        >>> str(Estimate(0.0741, 0.0478)), str(Estimate(1.0611)), str(Estimate(5.128, 12.7))
        ('0.074 ± 0.048', '1.061', '5 ± 13')
        >>> str(Estimate(0.998, bounds=Interval(0.9969, 0.9987)))
        '0.998 (0.997 to 0.999)'
        """
        return self._text("")

    def signed(self) -> str:
        """Value with its sign, and its interval if that is known.

        >>> Estimate(0.0025, 0.002).signed()
        '+0.0025 ± 0.0020'
        """
        return self._text("+")

    def size(self) -> Self:
        """Absolute value, with the same interval around it."""
        return replace(self, value=abs(self.value))

    @property
    def is_measurable(self) -> bool:
        """True if a change is larger than a rounding error and its interval does not include 0."""
        return abs(self.value) >= _ROUNDING and not abs(self.value) <= self.half_width

    @property
    def is_rise(self) -> bool:
        return self.value > 0 and self.is_measurable

    def _text(self, sign: str) -> str:
        if self.bounds:
            low, high = (_format_share(bound, 2, self.value) for bound in self.bounds)
            return f"{_format_share(self.value, 4)} ({low} to {high})"
        if np.isnan(self.half_width):
            return format_figure(self.value, sign)
        if self.half_width < _ROUNDING or np.isinf(self.half_width):
            return f"{format_figure(self.value, sign)} ± {format_figure(self.half_width)}"
        num_decimals = max(0, 1 - math.floor(math.log10(self.half_width)))
        return f"{self.value:{sign}z.{num_decimals}f} ± {self.half_width:.{num_decimals}f}"


def _format_share(share: float, num_digits: int, value: float | None = None) -> str:
    """Format a share so that one below 1 differs from 1.

    Args:
        num_digits: fewest significant digits.
        value: value whose interval the share bounds; the bound stays on its side of the value.

    >>> _format_share(0.99996, 4), _format_share(0.9969, 2, 0.998), _format_share(1.0, 2)
    ('0.99996', '0.997', '1')
    """
    for digits in range(num_digits, 17):
        text = f"{share:.{digits}g}"
        rounded = float(text)
        is_beyond = value is not None and (rounded - value) * (share - value) < 0
        if (rounded == 1) == (share == 1) and not is_beyond:
            return text
    return str(share)


def is_share(key: str, keys: Container[str]) -> bool:
    """Return whether a metric is an accuracy: of preference pairs, or of graded answers.

    Args:
        key: key of a held-out metric.
        keys: all metrics of the run. Graded answers also have a share of truncated ones.

    >>> is_share("test/accuracy", []), is_share("test/m_pass_at_2", ["test/m_truncated"]), is_share("test/margin", [])
    (True, True, False)
    """
    name = re.sub(r"_pass_at_\d+$", "", key)
    return key == ACCURACY or f"{name}_truncated" in keys


@dataclass(frozen=True, slots=True)
class Control:
    """Held-out metric at the end of another run, such as one without the terms, and its values by batch if stored."""

    value: Estimate
    batches: BatchValues | None = None


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """Metric of the held-out data at the first and the last evaluation of a run.

    Attributes:
        metric: name without `test/`; for the value of a term, the name of the term.
        first_step, last_step: steps of the two evaluations; equal after a single evaluation.
        before, after: values, with intervals if the run stored the values of its batches.
        change: mean change, with an interval if the run stored the values of the same batches at both steps.
        batches: values of the last evaluation, for comparisons with other runs; None if the run did not store them.
        is_of_term: whether the metric is the value of a term.
        note: sentence that explains the values; may be empty.
    """

    metric: str
    first_step: int
    last_step: int
    before: Estimate
    after: Estimate
    change: Estimate
    batches: BatchValues | None = None
    is_of_term: bool = False
    note: str = ""

    @property
    def is_compared(self) -> bool:
        """True if the run evaluated the metric at two different steps."""
        return self.first_step < self.last_step

    def describe_change(self) -> str:
        """Say in a sentence what became of a metric during the run.

        >>> change = Estimate(-0.0915, 0.0055)
        >>> HeldOutRow("logic", 0, 24, Estimate(0.2), Estimate(0.1085), change).describe_change()
        'logic fell by 0.0915 ± 0.0055 on held-out data, from 0.2 to 0.1085.'
        """
        if not self.change.is_measurable:
            return f"{self.metric} did not measurably change on held-out data: {self.change.signed()}."
        direction = "rose" if self.change.value > 0 else "fell"
        return (
            f"{self.metric} {direction} by {self.change.size()} on held-out data, from "
            f"{format_figure(self.before.value)} to {format_figure(self.after.value)}."
        )

    def compare(self, control: Control) -> Estimate:
        """Return the last value minus that of a control, with an interval if both have values of the same batches."""
        difference = _paired_difference(self.batches, control.batches)
        return difference or Estimate(self.after.value - control.value.value)


def is_bookkeeping(metric: str) -> bool:
    """Return whether a metric of an environment counts tokens, turns or kinds of groups.

    Args:
        metric: name without the prefix `test/`.

    >>> is_bookkeeping("env/all/total_episodes"), is_bookkeeping("env/all/num_letters")
    (True, False)
    """
    parts = metric.split("/")
    return parts[0] == "env" and (parts[2:3] == ["by_group"] or parts[-1] in _COUNTS)


def reward_parts(keys: Iterable[str]) -> dict[str, str]:
    """Names of the parts of a reward by their keys: the named rewards, then the environment's own metrics.

    >>> reward_parts(["env/all/num_letters", "env/all/reward/total", "reward/short/value", "reward/short/weight"])
    {'reward/short/value': 'short', 'env/all/num_letters': 'num_letters'}
    """
    keys = sorted(keys)
    named = {key: key.split("/")[1] for key in keys if key.startswith("reward/") and key.endswith("/value")}
    prefix = "env/all/"
    own = [key for key in keys if key.startswith(prefix) and key != REWARD and not is_bookkeeping(key)]
    return named | {key: key.removeprefix(prefix) for key in own}


def is_headline(key: str) -> bool:
    """Return whether a metric is the main held-out metric of a method or a metric of the user's evaluators.

    >>> is_headline("test/nll"), is_headline("test/exact_match"), is_headline("test/term/kl/value")
    (True, True, False)
    """
    if key in _HEADLINES:
        return True
    parts = key.removeprefix(HELD_OUT).split("/")
    is_known = parts[0] in ("term", "env", "reward") or parts[0] in _SIDE_METRICS
    return key.startswith(HELD_OUT) and not is_known


def _paired_difference(later: BatchValues | None, earlier: BatchValues | None) -> Estimate | None:
    if later and earlier and later.is_paired_with(earlier):
        return Estimate.of(later.minus(earlier))
    return None


def held_out_rows(
    history: Mapping[str, Sequence[tuple[int, float]]], batches: Mapping[int, Mapping[str, BatchValues]]
) -> list[HeldOutRow]:
    """Rows of the held-out metrics of a run: the main metrics first, the values of the terms last.

    Args:
        batches: values of terms and metrics by step, as `read_batch_values` returns them.
    """
    rows: list[HeldOutRow] = []
    keys = sorted(history, key=lambda key: (key not in _HEADLINES, key.startswith("test/term/"), key))
    for key, points in ((key, history[key]) for key in keys):
        if not key.startswith(HELD_OUT) or not points or key.endswith(_ERROR):
            continue
        is_of_term = key.startswith("test/term/")
        # The stored values have the name of the term, or the key of another metric.
        stored = key.removeprefix("test/term/").removesuffix(_VALUE) if is_of_term else key
        (first, before), (last, after) = points[0], points[-1]
        earlier, later = batches.get(first, {}).get(stored), batches.get(last, {}).get(stored)
        change = _paired_difference(later, earlier) or Estimate(after - before)
        shares = is_share(key, history)
        first_value = Estimate.of(earlier, is_share=shares) if earlier else Estimate(before)
        last_value = Estimate.of(later, is_share=shares) if later else Estimate(after)
        metric = stored.removeprefix(HELD_OUT)
        note = _describe_ties(batches) if key == ACCURACY else ""
        rows.append(HeldOutRow(metric, first, last, first_value, last_value, change, later, is_of_term, note))
    return rows


def _describe_ties(batches: Mapping[int, Mapping[str, BatchValues]]) -> str:
    """Say how many pairs of the first and the last evaluation have a margin of 0; empty if none has.

    Policy and reference are then equal. The sentence is also empty if scores are means over groups of pairs.
    """
    margins = {step: values[MARGIN] for step, values in batches.items() if MARGIN in values}
    shown: list[str] = []
    for step in sorted({min(margins), max(margins)} if margins else ()):
        accuracy = batches[step].get(ACCURACY)
        # Earlier versions stored means over groups without the sizes of the groups.
        if set(margins[step].num_datums_B) != {1} or (accuracy and not set(accuracy.values_B) <= {0.0, 1.0}):
            return ""
        share = fmean(abs(margin) < TIED for margin in margins[step].values_B)
        if share:
            shown.append(f"{_format_percent(share)} of the pairs at step {step}")
    count = "They count as wrong, except where rounding makes them right."
    return f"Ties in the accuracy, with a margin of 0 up to rounding: {', '.join(shown)}. {count}" if shown else ""


def _format_percent(share: float) -> str:
    """Format a share in whole percent; no other share looks like none or all.

    >>> _format_percent(0.004), _format_percent(0.25), _format_percent(0.996), _format_percent(1.0)
    ('<1%', '25%', '>99%', '100%')
    """
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def held_out_table(
    rows: Sequence[HeldOutRow], control: Mapping[str, Control] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Columns and text cells of held-out metrics.

    Args:
        control: metrics at the end of a run without the terms, by `HeldOutRow.metric`; adds two columns.
    """
    first, last = min(row.first_step for row in rows), max(row.last_step for row in rows)
    columns = ["held-out data", f"before (step {first})", f"after (step {last})"]
    cells = [
        [row.metric, _at_step(row.before, row.first_step, first), _at_step(row.after, row.last_step, last)]
        for row in rows
    ]
    if control is None:
        columns.append("change")
        for line, row in zip(cells, rows, strict=True):
            line.append(row.change.signed() if row.is_compared else "")
        return columns, cells
    columns += ["without the terms", "effect of the terms"]
    for line, row in zip(cells, rows, strict=True):
        other = control.get(row.metric)
        line += [str(other.value), row.compare(other).signed()] if other else ["", ""]
    return columns, cells


def describe_intervals(rows: Sequence[HeldOutRow]) -> str:
    """Explain the intervals in a table of held-out metrics; empty if it has none."""
    estimates = [estimate for row in rows for estimate in (row.before, row.after, row.change)]
    sentences: list[str] = []
    if any(not np.isnan(estimate.half_width) for estimate in estimates):
        sentences.append(
            "±: 95 % interval over held-out prompts or problems, or for terms over batches of them; of a change or an "
            "effect, over pairs."
        )
    if any(estimate.bounds for estimate in estimates):
        sentences.append("In brackets: Wilson's 95 % interval of an accuracy.")
    if sentences and not all(row.after.has_interval for row in rows):
        sentences.append("Metrics with one value or with equal values have no interval.")
    return " ".join(sentences)


def _at_step(value: Estimate, step: int, step_of_column: int) -> str:
    """Value, with its step if that is not the step of the column."""
    return str(value) if step == step_of_column else f"{value} (step {step})"


TARGET_COLUMNS = ("term", "target", "mean over the last quarter", "multiplier at the end", "result")
_NUM_PARTS = 5


@dataclass(frozen=True, slots=True)
class TargetRow:
    """Target of a term and the values that the run reached.

    Attributes:
        mean: mean value over the last quarter of the evaluations.
        half_width: half of the mean's 95 % interval; NaN for fewer than five evaluations or equal values.
        multiplier: multiplier of the last evaluation.
    """

    name: str
    target: TargetSpec
    mean: float
    half_width: float
    multiplier: float

    @property
    def is_met(self) -> bool:
        """True if the mean violates the limit by at most 10 % of the scale or `half_width`, whichever is larger."""
        violation = self.target.sign * (self.mean - self.target.limit)
        if self.target.equals is not None:
            violation = abs(violation)
        return violation <= np.nanmax([0.1 * self.target.large_violation, self.half_width])

    @property
    def result(self) -> str:
        """``met``, ``missed``, or ``met without effort`` for a limit that the last multiplier does not enforce."""
        if not self.is_met:
            return "missed"
        is_idle = self.target.equals is None and self.multiplier == self.target.bounds[0]
        return "met without effort" if is_idle else "met"

    def format(self) -> tuple[str, ...]:
        """Text cells, in the order of `TARGET_COLUMNS`."""
        mean = str(Estimate(self.mean, self.half_width))
        return self.name, str(self.target), mean, f"{self.multiplier:.4g}", self.result


REWARD_PREFIX = "reward/"


def target_rows(
    history: Mapping[str, Sequence[tuple[int, float]]], targets: Mapping[str, TargetSpec]
) -> list[TargetRow]:
    """Rows of the targets of a run; a term that was never evaluated has no row.

    The values of consecutive steps are correlated, so the interval is computed from the means of five consecutive parts
    of the last quarter (Student's t).

    Args:
        targets: targets by the name of a term, or by ``reward/<name>`` for a named reward.
    """
    rows: list[TargetRow] = []
    for name, target in targets.items():
        key = name if name.startswith(REWARD_PREFIX) else f"term/{name}"
        values = np.array([value for _, value in history.get(f"{key}/value", ())])
        multipliers = history.get(f"{key}/multiplier", ())
        if not len(values) or not multipliers:
            continue
        last = values[-max(1, len(values) // 4) :]
        half_width = float("nan")
        if len(last) >= _NUM_PARTS:
            means = [part.mean() for part in np.array_split(last, _NUM_PARTS)]
            # Equal means say nothing about their spread; means of equal values may differ by rounding.
            if len(set(means)) > 1 and len(set(last.tolist())) > 1:
                half_width = float(t_quantile(_NUM_PARTS - 1, 0.975) * np.std(means, ddof=1) / np.sqrt(_NUM_PARTS))
        rows.append(TargetRow(name, target, float(last.mean()), half_width, multipliers[-1][1]))
    return rows

"""Comparison of two runs on one page, in the layout of a run's report."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlflow.entities import Run as MlflowRun

from blocks.storage import RunDirectory
from objectives.term import BASE
from tasks.common.digests import Digests, changed_contents
from tasks.reports.examples import example_rows
from tasks.reports.html import html_charts, html_list, html_page, html_section, html_table, page_script
from tasks.reports.run_report import CHART_HINT, metric_sections
from tasks.reports.summary import RunSummary, summarize
from tasks.reports.tables import (
    COLUMNS,
    Control,
    Estimate,
    HeldOutRow,
    History,
    describe_intervals,
    format_row,
    recent_term_rows,
)
from tasks.training.checkpoints import CONTENTS_KEY, resumable
from tasks.training.examples import read_examples
from tasks.training.held_out import read_batch_values

# Held-out metrics that are means over tokens, so that runs with different tokenizers cannot be compared by them.
_PER_TOKEN = ("nll", "nll_per_token")


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """Stored run with its metrics."""

    name: str
    mlflow_run: MlflowRun
    directory: RunDirectory
    history: History

    def summary(self) -> RunSummary:
        """Summary of the run."""
        return summarize(self.name, self.mlflow_run, self.directory, self.history)


@dataclass(frozen=True, slots=True)
class Difference:
    """Held-out metric of two runs at their last evaluations.

    Attributes:
        change: value of the second run minus that of the first, with an interval if both used the same batches; None if
            the metric is a mean over tokens, and the runs have different tokenizers.
    """

    first: HeldOutRow
    second: HeldOutRow
    change: Estimate | None

    def format(self) -> tuple[str, ...]:
        """Text cells: metric, both values with their steps, and the difference."""
        values = (f"{row.after} (step {row.last_step})" for row in (self.first, self.second))
        change = "not comparable (different tokenizers)" if self.change is None else self.change.signed()
        return self.first.metric, *values, change


def compare_held_out(
    first: Sequence[HeldOutRow], second: Sequence[HeldOutRow], *, same_tokens: bool = True
) -> list[Difference]:
    """Differences of the metrics that both runs have, in the order of the first; comparable ones come first.

    Args:
        same_tokens: whether the runs have the same tokenizer.
    """
    others = {row.metric: row for row in second}
    differences = [
        Difference(
            row,
            other,
            other.compare(Control(row.after, row.batches)) if same_tokens or row.metric not in _PER_TOKEN else None,
        )
        for row in first
        if (other := others.get(row.metric))
    ]
    return sorted(differences, key=lambda difference: difference.change is None)


def comparison_page(first: ReportedRun, second: ReportedRun) -> str:
    """Page that compares two runs."""
    summaries = first.summary(), second.summary()
    contents = _changed_contents(first, second)
    same_tokens = "tokenizer" not in contents.get("tokenizer", ())
    differences = compare_held_out(summaries[0].held_out, summaries[1].held_out, same_tokens=same_tokens)
    title = f"{first.name} and {second.name}"
    columns = ("held-out data", first.name, second.name, "difference")
    params = [run.mlflow_run.data.params for run in (first, second)]
    notes = [f"Difference: {second.name} minus {first.name}; it has an interval if both runs evaluated the same data."]
    if not same_tokens:
        notes.append("Values of terms that are means over tokens depend on the tokenizer of a run.")
    notes.append(describe_intervals([row for pair in differences for row in (pair.first, pair.second)]))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict">{html.escape(_verdict(first, second, differences))}</p>',
        html_table(("run", first.name, second.name), _side_by_side(*(dict(summary.facts) for summary in summaries))),
        *(_warnings(run, summary) for run, summary in zip((first, second), summaries, strict=True)),
        html_section(
            "Held-out data",
            html_table(columns, [difference.format() for difference in differences]) if differences else "",
            intro=" ".join(filter(None, notes)),
        ),
        html_section(
            "Settings that differ",
            html_table(("field", first.name, second.name), rows) if (rows := _changed_settings(*params)) else "",
        ),
        html_section(
            "Content that differs",
            html_list(
                [
                    f"{kind}: the content of {', '.join(names)} differs between the runs."
                    for kind, names in contents.items()
                ]
            ),
        ),
        *_charts(first, second),
        html_section("Examples after training", *_examples(first, second)),
        page_script(has_charts=True),
    ]
    return html_page(title, "\n".join(filter(None, body)))


def _verdict(first: ReportedRun, second: ReportedRun, differences: Sequence[Difference]) -> str:
    if not differences:
        return "The runs have no held-out metric in common."
    main = differences[0]
    _, value, other, change = main.format()
    verdict = f"{main.first.metric} on held-out data: {value} in {first.name}, {other} in {second.name}"
    verdict += f", difference {change}." if main.change else "."
    per_token = [difference.first.metric for difference in differences if difference.change is None]
    if per_token:
        verdict += f" {' and '.join(per_token)} cannot be compared: the tokenizers of the runs differ."
    return verdict


def _side_by_side(first: Mapping[str, str], second: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = list(dict.fromkeys([*first, *second]))
    return [(name, first.get(name, ""), second.get(name, "")) for name in names]


def _changed_settings(first: Mapping[str, str], second: Mapping[str, str]) -> list[tuple[str, str, str]]:
    rows = _side_by_side(dict(sorted(first.items())), dict(sorted(second.items())))
    return [row for row in rows if row[1] != row[2] and row[0] not in ("run_name", "base_url")]


def _changed_contents(first: ReportedRun, second: ReportedRun) -> Mapping[str, Sequence[str]]:
    """Return the names whose content differs, by kind of content, such as `terms`."""
    digests: list[Digests] = []
    for run in (first, second):
        records = resumable(run.directory)
        contents = records[0].get(CONTENTS_KEY, None) if records else None
        digests.append((contents or {}).get("digests", {}))
    return changed_contents(*digests)


def _warnings(run: ReportedRun, summary: RunSummary) -> str:
    if not summary.warnings:
        return ""
    return f'<div class="warnings"><b>Warnings of {html.escape(run.name)}</b>{html_list(summary.warnings)}</div>'


def _charts(first: ReportedRun, second: ReportedRun) -> Iterator[str]:
    from tasks.reports.charts import DrawnRun, draw_term  # Plotly takes long to import

    runs = [DrawnRun(run.history, read_batch_values(run.directory), run.name) for run in (first, second)]
    tables = [recent_term_rows(run.history) for run in (first, second)]
    names = dict.fromkeys(row.name for _, rows in tables for row in rows if row.name != BASE)
    yield CHART_HINT
    yield from metric_sections(runs)
    yield html_section(
        "What did each term do?",
        html_charts(draw_term(runs, name) for name in names),
        *(
            f"<h3>{html.escape(run.name)}: {title}</h3>" + html_table(COLUMNS, [format_row(row) for row in rows])
            for run, (title, rows) in zip((first, second), tables, strict=True)
            if rows
        ),
    )


def _examples(first: ReportedRun, second: ReportedRun) -> list[str]:
    columns = []
    for run in (first, second):
        examples = read_examples(run.directory)
        if not examples:
            return []
        columns.append((f"{run.name}, step {max(examples)}", examples[max(examples)]))
    return example_rows(columns)

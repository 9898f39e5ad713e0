"""Report of a sweep: one self-contained page, saved to the sweep's directory, MLflow and Prefect."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Literal

from matplotlib.figure import Figure
from mlflow import MlflowClient
from prefect.artifacts import create_markdown_artifact

from blocks.storage import RunDirectory
from tasks.common.task import retried_task
from tasks.reports.html import (
    artifact_key,
    escape_markdown,
    html_page,
    html_table,
    inline_svg,
    markdown_code,
    markdown_table,
    mlflow_artifact_link,
    render_figure,
)
from tasks.reports.tables import Estimate
from tasks.sweeps.charts import draw_effects, draw_maps, draw_parallel, draw_pareto
from tasks.sweeps.effects import Effect, estimate_effects, reported_metrics
from tasks.sweeps.store import Trials
from tasks.sweeps.table import PointRow, dimensions, row_cells, table_columns

BASE = "loss/base"
_MAX_TABLE_ROWS = 20
DIFFERENCE_COLUMNS = ("point", "worse than the best by", "pairs", "p-value", "smallest detectable difference")
_TRIAL_COLUMNS = ("trial", "status", "value", "seconds", "reason")


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """Input of a sweep's report.

    Attributes:
        run_name: name of the sweep.
        metric: metric that the sweep optimizes.
        mode: direction of the optimization.
        trials: all points and finished trials.
        rows: points, the best first.
        strengths: weight of each regularizer, by point number and regularizer.
        differences: comparisons of points with the best one: text cells in the order of `DIFFERENCE_COLUMNS`.
        best_config: text of the best config; None if no point has completed all of its seeds.
    """

    run_name: str
    metric: str
    mode: Literal["min", "max"]
    trials: Trials
    rows: Sequence[PointRow]
    strengths: Mapping[int, Mapping[str, float]]
    differences: Sequence[Sequence[str]]
    best_config: str | None


@retried_task(name="report")
def write_sweep_report(directory: RunDirectory, client: MlflowClient, run_id: str, summary: SweepSummary) -> str:
    """Write the report of a sweep and return its location."""
    terms = list(dict.fromkeys(name for weights in summary.strengths.values() for name in weights))
    metrics = reported_metrics(summary.rows, summary.metric, terms)
    effects = estimate_effects(summary.rows, summary.strengths, metrics)
    figures = _figures(summary, metrics, effects)
    page = html_page(summary.run_name, _body(summary, effects, figures))
    directory.write_bytes("report.html", page.encode())
    client.log_text(run_id, page, "report.html")
    for name, figure in figures.items():
        directory.write_bytes(f"report_{name}.png", render_figure(figure, "png"))
        client.log_figure(run_id, figure, f"report/{name}.png")
    if summary.best_config:
        client.log_text(run_id, summary.best_config, "best.yaml")
    location = f"{directory.location}/report.html"
    rows = [row_cells(row, summary.rows) for row in summary.rows[:_MAX_TABLE_ROWS]]
    table = markdown_table(table_columns(summary.rows, summary.metric), rows)
    create_markdown_artifact(
        key=artifact_key("sweep", summary.run_name),
        markdown=f"# {escape_markdown(summary.run_name)}\n\nThe report is {markdown_code(location)}, and in "
        f"{mlflow_artifact_link(client, run_id, 'report.html')}.\n\n{table}\n",
        description=f"Points of {escape_markdown(summary.run_name)}",
    )
    return location


def effect_table(effects: Sequence[Effect]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the effects as text, one row per regularizer and kind of change."""
    metrics = tuple(dict.fromkeys(effect.metric for effect in effects))
    rows: dict[str, dict[str, str]] = {}
    for effect in effects:
        estimate = Estimate(effect.estimate, effect.half_width if math.isfinite(effect.half_width) else math.nan)
        text = estimate.signed() if math.isfinite(effect.estimate) else "not determined"
        rows.setdefault(f"{effect.regularizer}: {effect.change}", {})[effect.metric] = text
    return ("regularizer", *metrics), [(name, *(cells[metric] for metric in metrics)) for name, cells in rows.items()]


def _figures(summary: SweepSummary, metrics: Sequence[str], effects: Sequence[Effect]) -> dict[str, Figure]:
    """Charts by name, without those that have no data."""
    rows = summary.rows
    terms = [key.split("/")[1] for key in metrics if key.startswith("term/")]
    completed = [trial for row in rows for trial in row.completed]
    figures: dict[str, Figure] = {}
    if effects:
        samples = {metric: [t.metrics[metric] for t in completed if metric in t.metrics] for metric in metrics}
        spreads = {metric: pstdev(values) for metric, values in samples.items() if values}
        if any(spreads.values()):
            figures["effects"] = draw_effects(effects, spreads)
    if terms and BASE in metrics:
        figures["pareto"] = draw_pareto(rows, BASE, terms)
    if completed and len(dimensions(rows)) > 1:
        figures["maps"] = draw_maps(rows, summary.metric)
    if completed and dimensions(rows):
        figures["parallel"] = draw_parallel(rows, summary.metric, summary.mode)
    return figures


def _body(summary: SweepSummary, effects: Sequence[Effect], figures: Mapping[str, Figure]) -> str:
    rows, trials = summary.rows, list(summary.trials.finished.values())
    counts = ", ".join(
        f"{sum(trial.status == status for trial in trials)} {status}" for status in ("completed", "pruned", "failed")
    )
    better = "smaller" if summary.mode == "min" else "greater"
    parts = [
        f"<h1>{html.escape(summary.run_name)}</h1>",
        f"<p>{len(rows)} points, {len(trials)} trials: {counts}. Best first, by the mean of "
        f"{html.escape(summary.metric)} over the seeds; {better} is better. Intervals are 95 % intervals.</p>",
        html_table(table_columns(rows, summary.metric), [row_cells(row, rows) for row in rows]),
    ]
    if summary.differences:
        parts += [
            "<h2>Is the best point better?</h2>",
            f"<p>Paired differences from the best point, which was chosen on the same values. The p-value is the "
            f"probability that any two of {len(summary.differences) + 1} equal points differ at least that much. The "
            "intervals hold for all pairs of points at once. The last column is the smallest true difference that this "
            "test finds significant at 5 % in 80 % of cases; with fewer than six pairs, no difference is "
            "significant.</p>",
            "<p>Paired problems have the mean score over the seeds. Their intervals and p-values compare the trained "
            "weights of these seeds; they leave out the spread between training runs, which only the intervals of the "
            "first table show.</p>",
            html_table(DIFFERENCE_COLUMNS, summary.differences),
        ]
    if effects:
        parts += [
            "<h2>Effect of each regularizer</h2>",
            "<p>Change of a metric when the model is trained with the regularizer, and when its weight grows tenfold. "
            "A linear fit over all completed trials estimates both; it accounts for the other dimensions and for the "
            "seeds.</p>",
            html_table(*effect_table(effects)),
        ]
    headings = {
        "effects": "",
        "pareto": "<h2>Base loss against each term</h2><p>Means over the seeds, labeled with point numbers.</p>",
        "maps": f"<h2>{html.escape(summary.metric)} over pairs of dimensions</h2>",
        "parallel": "<h2>Parallel coordinates</h2>",
    }
    parts += [headings[name] + inline_svg(figure) for name, figure in figures.items()]
    if summary.best_config:
        parts.append(f"<h2>Best config</h2><pre>{html.escape(summary.best_config)}</pre>")
    trial_rows = [
        (
            trial.run_name,
            trial.status,
            "" if trial.value is None else f"{trial.value:.4f}",
            f"{trial.seconds:.1f}",
            trial.reason,
        )
        for trial in sorted(trials, key=lambda trial: (trial.point, trial.seed))
    ]
    return "\n".join([*parts, "<h2>Trials</h2>", html_table(_TRIAL_COLUMNS, trial_rows)])

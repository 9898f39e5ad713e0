"""The report of a sweep: one self-contained page, in the sweep's directory, in MLflow and in Prefect."""

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
from tasks.options import retried_task
from tasks.page import artifact_key, drawn, html_page, html_table, markdown, seen_in_mlflow, svg
from tasks.sweep_charts import draw_effects, draw_maps, draw_parallel, draw_pareto
from tasks.sweep_effects import Effect, effects, shown_metrics
from tasks.sweep_table import PointRow, columns_of, dimensions, row_cells
from tasks.trials import Trials

BASE = "loss/base"
_SHOWN = 20
_TRIAL_COLUMNS = ("trial", "status", "value", "seconds", "why")


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """What a report is made of.

    Attributes:
        run_name, metric, mode: of the sweep.
        trials: how they ended.
        rows: its points, the best first.
        strengths: the weight of each regularizer at each point, by its number.
        best_config: the text of the best config; None where no point is whole.
    """

    run_name: str
    metric: str
    mode: Literal["min", "max"]
    trials: Trials
    rows: Sequence[PointRow]
    strengths: Mapping[int, Mapping[str, float]]
    best_config: str | None


@retried_task(name="report")
def write_sweep_report(directory: RunDirectory, client: MlflowClient, run_id: str, summary: SweepSummary) -> str:
    """Draw what the trials came to and keep it; returns where."""
    terms = list(dict.fromkeys(name for each in summary.strengths.values() for name in each))
    metrics = shown_metrics(summary.rows, summary.metric, terms)
    found = effects(summary.rows, summary.strengths, metrics)
    figures = _figures(summary, metrics, found)
    page = html_page(summary.run_name, _body(summary, found, figures))
    directory.write_bytes("report.html", page.encode())
    client.log_text(run_id, page, "report.html")
    for name, figure in figures.items():
        directory.write_bytes(f"report_{name}.png", drawn(figure, "png"))
        client.log_figure(run_id, figure, f"report/{name}.png")
    if summary.best_config:
        client.log_text(run_id, summary.best_config, "best.yaml")
    where = f"{directory.location}/report.html"
    table = markdown(
        columns_of(summary.rows, summary.metric), [row_cells(r, summary.rows) for r in summary.rows[:_SHOWN]]
    )
    create_markdown_artifact(
        key=artifact_key("sweep", summary.run_name),
        markdown=f"# {summary.run_name}\n\nThe report is `{where}`, and in "
        f"{seen_in_mlflow(client, run_id, 'report.html')}.\n\n{table}\n",
        description=f"Points of {summary.run_name}",
    )
    return where


def effect_cells(found: Sequence[Effect]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of effects as text: its head, and one row per regularizer and kind of change."""
    metrics = tuple(dict.fromkeys(each.metric for each in found))
    rows: dict[str, dict[str, str]] = {}
    for each in found:
        half = f" ± {each.half_width:.3g}" if math.isfinite(each.half_width) else ""
        text = f"{each.estimate:+.3g}{half}" if math.isfinite(each.estimate) else "not determined"
        rows.setdefault(f"{each.regularizer}: {each.of}", {})[each.metric] = text
    return ("regularizer", *metrics), [(name, *(cells[metric] for metric in metrics)) for name, cells in rows.items()]


def _figures(summary: SweepSummary, metrics: Sequence[str], found: Sequence[Effect]) -> dict[str, Figure]:
    """The drawings that there is something for."""
    rows = summary.rows
    terms = [key.split("/")[1] for key in metrics if key.startswith("term/")]
    completed = [trial for row in rows for trial in row.completed]
    figures: dict[str, Figure] = {}
    if found:
        values = {metric: [t.metrics[metric] for t in completed if metric in t.metrics] for metric in metrics}
        spreads = {metric: pstdev(each) for metric, each in values.items() if each}
        if any(spreads.values()):
            figures["effects"] = draw_effects(found, spreads)
    if terms and BASE in metrics:
        figures["pareto"] = draw_pareto(rows, BASE, terms)
    if completed and len(dimensions(rows)) > 1:
        figures["maps"] = draw_maps(rows, summary.metric)
    if completed and dimensions(rows):
        figures["parallel"] = draw_parallel(rows, summary.metric, summary.mode)
    return figures


def _body(summary: SweepSummary, found: Sequence[Effect], figures: Mapping[str, Figure]) -> str:
    rows, trials = summary.rows, list(summary.trials.ended.values())
    counts = ", ".join(
        f"{sum(trial.status == status for trial in trials)} {status}" for status in ("completed", "pruned", "failed")
    )
    better = "smaller" if summary.mode == "min" else "greater"
    parts = [
        f"<h1>{html.escape(summary.run_name)}</h1>",
        f"<p>{len(rows)} points, {len(trials)} trials: {counts}. The best first, by the mean of "
        f"{html.escape(summary.metric)} over the seeds; {better} is better. The intervals are 95 % ones.</p>",
        html_table(columns_of(rows, summary.metric), [row_cells(row, rows) for row in rows]),
    ]
    if found:
        parts += [
            "<h2>What each regularizer does</h2>",
            "<p>What a metric gains where it is trained, and for ten times its weight: a linear fit over all trials "
            "that completed, with whatever else differs between them and their seeds.</p>",
            html_table(*effect_cells(found)),
        ]
    headings = {
        "effects": "",
        "pareto": "<h2>Base loss against each term</h2><p>Means over the seeds, with the points' numbers.",
        "maps": f"<h2>{html.escape(summary.metric)} over each two dimensions</h2>",
        "parallel": "<h2>Parallel coordinates</h2>",
    }
    parts += [headings[name] + svg(figure) for name, figure in figures.items()]
    if summary.best_config:
        parts.append(f"<h2>The best config</h2><pre>{html.escape(summary.best_config)}</pre>")
    ends = [
        (
            trial.run_name,
            trial.status,
            "" if trial.value is None else f"{trial.value:.4f}",
            f"{trial.seconds:.1f}",
            trial.reason,
        )
        for trial in sorted(trials, key=lambda each: (each.point, each.seed))
    ]
    return "\n".join([*parts, "<h2>Trials</h2>", html_table(_TRIAL_COLUMNS, ends)])

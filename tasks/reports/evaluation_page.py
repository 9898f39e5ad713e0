"""Page of an evaluation of several checkpoints of a run: each metric over the steps."""

from __future__ import annotations

import html
from collections.abc import Mapping

from tasks.common.task import retried_task
from tasks.reports.html import html_charts, html_page, page_script
from tasks.reports.tables import History
from tasks.training.held_out import BatchValues
from tasks.training.tracking.metrics import MetricsLog

# Suffixes of errors and bounds of a metric. The metric's chart shows them, if at all; they have no chart of their own.
_SIDE_FIGURES = ("_stderr", "_low", "_high")


@retried_task(name="report")
def write_curves(
    log: MetricsLog,
    run_name: str,
    metrics: Mapping[int, Mapping[str, float]],
    scores: Mapping[int, Mapping[str, BatchValues]],
    baseline: Mapping[str, float],
    note: str = "",
) -> None:
    """Save the charts as `evaluation.html` in MLflow.

    Args:
        metrics: metrics by step.
        scores: score of each problem by step and metric, for metrics that are means of such scores.
        baseline: metrics of the baseline; empty without one.
        note: sentence above the charts.
    """
    log.client.log_text(log.run_id, evaluation_page(run_name, metrics, scores, baseline, note), "evaluation.html")


def evaluation_page(
    run_name: str,
    metrics: Mapping[int, Mapping[str, float]],
    scores: Mapping[int, Mapping[str, BatchValues]],
    baseline: Mapping[str, float],
    note: str = "",
) -> str:
    """Page with a chart for each metric; for arguments, see `write_curves`."""
    from tasks.reports.charts import DrawnRun, draw_metric  # Plotly takes long to import

    steps = sorted(metrics)
    keys = sorted({key for at_step in metrics.values() for key in at_step})
    history: History = {key: [(step, metrics[step][key]) for step in steps if key in metrics[step]] for key in keys}
    runs = [DrawnRun(history, scores)]
    if baseline:
        level: History = {key: [(steps[0], value), (steps[-1], value)] for key, value in baseline.items()}
        runs.append(DrawnRun(level, label="(baseline)"))
    reading = "Points: checkpoints; bars: 95 % interval over problems, of metrics that have a score for each problem."
    charts = [draw_metric(runs, key, "", reading, held_out=key) for key in keys if not key.endswith(_SIDE_FIGURES)]
    text = f"<p>{html.escape(note)}</p>\n" if note else ""
    body = f"<h1>{html.escape(run_name)}</h1>\n{text}{html_charts(charts)}\n{page_script(has_charts=True)}"
    return html_page(run_name, body)

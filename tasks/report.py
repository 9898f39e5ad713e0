"""The report of a run: one self-contained page with its curves, in the run's directory and in MLflow."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blocks.storage import RunDirectory
from tasks.metrics import MetricsLog
from tasks.options import retried_task
from tasks.term_table import COLUMNS, TermRow, cells, term_rows

History = Mapping[str, Sequence[tuple[int, float]]]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{name}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} th, td {{ padding: .3rem .8rem; text-align: right }}
th {{ border-bottom: 2px solid #444 }} td {{ border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }} svg {{ width: 100%; height: auto }}
</style>
<h1>{name}</h1>
<p>MLflow run {run_id}. Each term at its last step; a share is its weighted gradient's norm among all terms' norms,
a cosine below zero means that the term pulls against the base loss.</p>
{table}
{figure}
</html>
"""


@retried_task(name="report")
def write_report(directory: RunDirectory, log: MetricsLog, run_name: str, history: History) -> str:
    """Draw the run's history and keep it; returns where."""
    rows = term_rows({key: points[-1][1] for key, points in history.items()})
    svg = _svg(draw_terms(history, [row.name for row in rows]))
    page = _PAGE.format(name=html.escape(run_name), run_id=log.run_id, table=_table(rows), figure=svg)
    directory.write_bytes("report.html", page.encode())
    log.client.log_text(log.run_id, page, "report.html")
    return f"{directory.location}/report.html"


def draw_terms(history: History, terms: Sequence[str]) -> Figure:
    """The loss, and each term's value, share of the gradient and cosine to the base, over the steps."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    colors = {name: f"C{index}" for index, name in enumerate(terms)}  # a term looks the same in every drawing
    losses = {"train": "train_mean_nll", "test": "test/nll"}
    _lines(axes[0, 0], history, losses, "Mean NLL (nats per token)", {})
    regularizers = [name for name in terms if name != "base"]
    _lines(
        axes[0, 1],
        history,
        {name: f"term/{name}/value" for name in regularizers},
        "Value of each regularizer",
        colors,
    )
    _lines(axes[1, 0], history, {name: f"term/{name}/grad_share" for name in terms}, "Share of the gradient", colors)
    _lines(
        axes[1, 1],
        history,
        {name: f"term/{name}/cosine_to_base" for name in regularizers},
        "Cosine to the base",
        colors,
    )
    axes[1, 0].set_ylim(0, 1)
    axes[1, 1].axhline(0, color="0.6", linewidth=0.8)
    return figure


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _lines(axes: Axes, history: History, keys: Mapping[str, str], title: str, colors: Mapping[str, str]) -> None:
    for label, key in keys.items():
        points = history.get(key, ())
        if points:
            marker = "." if len(points) < 40 else None
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, color=colors.get(label))
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()


def _table(rows: Sequence[TermRow]) -> str:
    head = "".join(f"<th>{column}" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells(row)) for row in rows)
    return f"<table><tr>{head}{body}</table>"

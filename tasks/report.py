"""The report of a run: one self-contained page and its drawings, in the run's directory, in MLflow and in Prefect."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from blocks.storage import RunDirectory
from objectives.sensitivity import Gradients, factor_of_half, respond
from tasks.metrics import MetricsLog
from tasks.options import retried_task
from tasks.page import artifact_key, drawn, html_page, html_table, markdown, seen_in_mlflow, svg
from tasks.term_charts import (
    History,
    cosine_key,
    draw_conflicts,
    draw_contributions,
    draw_shares,
    draw_terms,
)
from tasks.term_table import COLUMNS, cells, term_rows

FACTORS = (0.5, 2.0, 10.0)
SENSITIVITY_COLUMNS = (
    "term",
    "share now",
    *(f"share at weight x{factor:g}" for factor in FACTORS),
    *(f"cosine of the whole to the base at x{factor:g}" for factor in FACTORS),
    "factor for half of the gradient",
)

_BODY = """<h1>{name}</h1>
<p><b>{note}</b></p>
<p>MLflow run {run_id}. Each term at its last step; a share is its weighted gradient's norm among all terms' norms,
a cosine below zero means that the term pulls against the base loss.</p>
{table}
{terms}
<h2>What the weights do</h2>
<p>The gradient of the last steps, had one term's weight been another and all others what they are.</p>
{sensitivity}
{shares}
{contributions}
<div style="max-width: 650px">{conflicts}</div>
"""


@retried_task(name="report")
def write_report(directory: RunDirectory, log: MetricsLog, run_name: str, history: History, note: str = "") -> str:
    """Draw the run's history and keep it, with a note above all; returns where."""
    last = {key: points[-1][1] for key, points in history.items()}
    rows = term_rows(last)
    names = [row.name for row in rows]
    figures = {
        "contributions": draw_contributions(history, names),
        "shares": draw_shares(history, names),
        "conflicts": draw_conflicts(history, names),
        "terms": draw_terms(history, names),
    }
    terms, sensitivity = [cells(row) for row in rows], sensitivity_cells(last, names)
    body = _BODY.format(
        name=html.escape(run_name),
        run_id=log.run_id,
        note=html.escape(note),
        table=html_table(COLUMNS, terms),
        sensitivity=html_table(SENSITIVITY_COLUMNS, sensitivity),
        **{name: svg(figure) for name, figure in figures.items()},
    )
    page = html_page(run_name, body)
    directory.write_bytes("report.html", page.encode())
    log.client.log_text(log.run_id, page, "report.html")
    for name, figure in figures.items():
        directory.write_bytes(f"report_{name}.png", drawn(figure, "png"))
        log.client.log_figure(log.run_id, figure, f"report/{name}.png")
    where = f"{directory.location}/report.html"
    if flow_run.get_id():  # without one there is no page in Prefect to be on
        tables = "\n\n".join([note, markdown(COLUMNS, terms), markdown(SENSITIVITY_COLUMNS, sensitivity)])
        _link(run_name, where, log, tables)
    return where


def sensitivity_cells(metrics: Mapping[str, float], names: Sequence[str]) -> list[tuple[str, ...]]:
    """What other weights would do to the gradient, one row per term that has a weight, as text."""
    cosines = [
        [1.0 if a == b else metrics.get(cosine_key(a, b), metrics.get(cosine_key(b, a), 0.0)) for b in names]
        for a in names
    ]
    norms = [metrics.get(f"term/{name}/grad_norm_weighted", 0.0) for name in names]
    gradients = Gradients(names, norms, cosines)
    rows = []
    for name, norm in zip(names, norms, strict=True):
        if name != "base" and norm > 0:
            responses = [respond(gradients, name, factor) for factor in (1.0, *FACTORS)]
            half = factor_of_half(gradients, name)
            shares = (f"{response.share:.1%}" for response in responses)
            directions = (f"{response.cosine_to_base:+.3f}" for response in responses[1:])
            rows.append((name, *shares, *directions, f"x{half:.3g}" if math.isfinite(half) else "none"))
    return rows


def _link(run_name: str, where: str, log: MetricsLog, tables: str) -> None:
    """The tables and the way to the report, on the page of the Prefect run."""
    seen = seen_in_mlflow(log.client, log.run_id, "report.html")
    create_markdown_artifact(
        key=artifact_key("report", run_name),
        markdown=f"# {run_name}\n\nThe report is `{where}`, and in {seen}.\n\n{tables}\n",
        description=f"Terms of {run_name}",
    )

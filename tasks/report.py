"""The report of a run: one self-contained page and its drawings, in the run's directory, in MLflow and in Prefect."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from prefect.artifacts import create_markdown_artifact

from blocks.storage import RunDirectory
from objectives.sensitivity import Gradients, factor_of_half, respond
from tasks.metrics import MetricsLog
from tasks.options import retried_task
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
{terms}
<h2>What the weights do</h2>
<p>The gradient of the last steps, had one term's weight been another and all others what they are.</p>
{sensitivity}
{shares}
{contributions}
<div style="max-width: 650px">{conflicts}</div>
</html>
"""


@retried_task(name="report")
def write_report(directory: RunDirectory, log: MetricsLog, run_name: str, history: History) -> str:
    """Draw the run's history and keep it; returns where."""
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
    page = _PAGE.format(
        name=html.escape(run_name),
        run_id=log.run_id,
        table=_table(COLUMNS, terms),
        sensitivity=_table(SENSITIVITY_COLUMNS, sensitivity),
        **{name: _svg(figure) for name, figure in figures.items()},
    )
    directory.write_bytes("report.html", page.encode())
    log.client.log_text(log.run_id, page, "report.html")
    for name, figure in figures.items():
        directory.write_bytes(f"report_{name}.png", _drawn(figure, "png"))
        log.client.log_figure(log.run_id, figure, f"report/{name}.png")
    where = f"{directory.location}/report.html"
    _link(run_name, where, log, _markdown(COLUMNS, terms) + "\n\n" + _markdown(SENSITIVITY_COLUMNS, sensitivity))
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
    tracking, run = log.client.tracking_uri, log.client.get_run(log.run_id)
    page = f"experiments/{run.info.experiment_id}/runs/{log.run_id}/artifacts/report.html"
    seen = f"[MLflow]({tracking.rstrip('/')}/#/{page})" if tracking.startswith("http") else f"MLflow run {log.run_id}"
    create_markdown_artifact(
        key="report-" + re.sub("[^a-z0-9]+", "-", run_name.lower()).strip("-"),
        markdown=f"# {run_name}\n\nThe report is `{where}`, and in {seen}.\n\n{tables}\n",
        description=f"Terms of {run_name}",
    )


def _svg(figure: Figure) -> str:
    text = _drawn(figure, "svg").decode()
    return text[text.index("<svg") :]


def _drawn(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{column}" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

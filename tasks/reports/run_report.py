"""Report of a run: one self-contained page and its charts, saved to the run's directory, MLflow and Prefect."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from statistics import median

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from blocks.storage import RunDirectory
from objectives.gradients.sensitivity import Gradients, factor_of_half, respond
from objectives.term import BASE
from tasks.common.task import retried_task
from tasks.reports.html import (
    artifact_key,
    html_page,
    html_table,
    inline_svg,
    markdown_table,
    mlflow_artifact_link,
    render_figure,
)
from tasks.reports.summary import summarize
from tasks.reports.tables import (
    COLUMNS,
    TARGET_COLUMNS,
    TargetRow,
    format_row,
    held_out_rows,
    held_out_table,
    term_rows,
)
from tasks.reports.term_charts import (
    History,
    cosine_key,
    draw_conflicts,
    draw_contributions,
    draw_shares,
    draw_targets,
    draw_terms,
)
from tasks.training.held_out import read_batch_values
from tasks.training.metrics import MetricsLog

FACTORS = (0.5, 2.0, 10.0)
WINDOW = 20
SENSITIVITY_COLUMNS = (
    "term",
    "share now",
    *(f"share at weight x{factor:g}" for factor in FACTORS),
    *(f"cosine of the total to the base at x{factor:g}" for factor in FACTORS),
    "factor for half of the gradient",
)

_TARGETS = """<h2>Targets</h2>
<p>A target is met if the mean violates it by at most 10 % of its scale, or by less than the mean's 95 % interval.</p>
{table}
{figure}
"""

_BODY = """<h1>{name}</h1>
<p class="verdict">{verdict}</p>
<p><b>{note}</b></p>
{facts}
{held_out}
{warnings}
<h2>Terms</h2>
<p>Values are from each term's last step. A share is the term's part of the summed norms of all
weighted gradients; a cosine below zero means that the term pulls against the base loss.</p>
{table}
{targets}
{terms}
<h2>Sensitivity to the weights</h2>
<p>Effect of changing one term's weight while all other weights stay the same: medians over the last {window} steps, and
the range of the share. Steps at which a term has no gradient count for its share now only.</p>
{sensitivity}
{shares}
{contributions}
<div style="max-width: 650px">{conflicts}</div>
<h2>Next</h2>
<p>Weights: <code>{weights}</code></p>
<pre>{commands}</pre>
"""

_HELD_OUT = """<h2>Held-out data</h2>
{table}
<p>±: 95 % interval of a term over the held-out batches; of a change, over paired batches.</p>
"""


@retried_task(name="report")
def write_report(
    directory: RunDirectory,
    log: MetricsLog,
    run_name: str,
    history: History,
    note: str = "",
    targets: Sequence[TargetRow] = (),
) -> str:
    """Write the report of a run, with a note at its top, and return its location."""
    last = {key: points[-1][1] for key, points in history.items()}
    rows = term_rows(last)
    names = [row.name for row in rows]
    figures = {
        "contributions": draw_contributions(history, names),
        "shares": draw_shares(history, names),
        "conflicts": draw_conflicts(history, names),
        "terms": draw_terms(history, names),
    }
    target_table = ""
    if targets:
        figures["targets"] = draw_targets(history, {row.name: row.target.limit for row in targets})
        target_table = html_table(TARGET_COLUMNS, [row.format() for row in targets])
    summary = summarize(run_name, log.client.get_run(log.run_id), directory, history)
    measured = held_out_rows(history, read_batch_values(directory))
    columns, cells = held_out_table(measured) if measured else ([], [])
    terms, sensitivity = [format_row(row) for row in rows], sensitivity_cells(history, names)
    body = _BODY.format(
        name=html.escape(run_name),
        verdict=html.escape(summary.verdict),
        facts=html_table(("run", ""), [*summary.facts, ("MLflow run", log.run_id)]),
        held_out=_HELD_OUT.format(table=html_table(columns, cells)) if measured else "",
        warnings=_warning_list(summary.warnings),
        weights=html.escape(summary.weights),
        commands=html.escape("\n".join(summary.commands)),
        window=WINDOW,
        note=html.escape(note),
        table=html_table(COLUMNS, terms),
        targets=_TARGETS.format(table=target_table, figure=inline_svg(figures["targets"])) if targets else "",
        sensitivity=html_table(SENSITIVITY_COLUMNS, sensitivity),
        **{name: inline_svg(figure) for name, figure in figures.items() if name != "targets"},
    )
    page = html_page(run_name, body)
    directory.write_bytes("report.html", page.encode())
    log.client.log_text(log.run_id, page, "report.html")
    for name, figure in figures.items():
        directory.write_bytes(f"report_{name}.png", render_figure(figure, "png"))
        log.client.log_figure(log.run_id, figure, f"report/{name}.png")
    location = f"{directory.location}/report.html"
    if flow_run.get_id():  # Prefect shows artifacts on the page of a flow run
        facts = markdown_table(("run", ""), summary.facts)
        tables = [facts, *([markdown_table(columns, cells)] if measured else [])]
        tables += [markdown_table(COLUMNS, terms), markdown_table(SENSITIVITY_COLUMNS, sensitivity)]
        if targets:
            tables.insert(-1, markdown_table(TARGET_COLUMNS, [row.format() for row in targets]))
        warnings = [f"- **Warning:** {warning}" for warning in summary.warnings]
        commands = "```\n" + "\n".join(summary.commands) + "\n```"
        parts = [summary.verdict, note, "\n".join(warnings), *tables, commands]
        _create_artifact(run_name, location, log, "\n\n".join(filter(None, parts)))
    return location


def _warning_list(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return "<h2>Warnings</h2><ul>" + "".join(f"<li>{html.escape(warning)}" for warning in warnings) + "</ul>"


def sensitivity_cells(history: History, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Text cells of the gradient's sensitivity to each weight; one row per regularizer with a gradient.

    Figures are medians over the last `WINDOW` steps, because those of a single batch swing widely. The share has the
    range over these steps.
    """
    points = {key: dict(steps) for key, steps in history.items()}
    steps = sorted(points.get(_norm_key(BASE), {}))[-WINDOW:]
    gradients = [_gradients_at(points, names, step) for step in steps]
    rows: list[tuple[str, ...]] = []
    for name in names:
        index = names.index(name)
        trained = [gradient for gradient in gradients if gradient.weighted_norms[index] > 0]
        if name == BASE or not trained:
            continue
        shares_now = [respond(gradient, name, 1.0).share for gradient in gradients]
        responses = [[respond(gradient, name, factor) for gradient in trained] for factor in FACTORS]
        half = median(factor_of_half(gradient, name) for gradient in trained)
        rows.append(
            (
                name,
                f"{median(shares_now):.1%} ({min(shares_now):.1%} to {max(shares_now):.1%})",
                *(f"{median(response.share for response in column):.1%}" for column in responses),
                *(f"{median(response.cosine_to_base for response in column):+.3f}" for column in responses),
                f"x{half:.3g}" if math.isfinite(half) else "none",
            )
        )
    return rows


def _norm_key(name: str) -> str:
    return f"term/{name}/grad_norm_weighted"


def _gradients_at(points: Mapping[str, Mapping[int, float]], names: Sequence[str], step: int) -> Gradients:
    def value(key: str) -> float | None:
        return points.get(key, {}).get(step)

    def cosine(a: str, b: str) -> float:
        return 1.0 if a == b else value(cosine_key(a, b)) or value(cosine_key(b, a)) or 0.0

    return Gradients(
        names, [value(_norm_key(name)) or 0.0 for name in names], [[cosine(a, b) for b in names] for a in names]
    )


def _create_artifact(run_name: str, location: str, log: MetricsLog, tables: str) -> None:
    """Show the tables and links to the report on the page of the Prefect run."""
    link = mlflow_artifact_link(log.client, log.run_id, "report.html")
    create_markdown_artifact(
        key=artifact_key("report", run_name),
        markdown=f"# {run_name}\n\nThe report is `{location}`, and in {link}.\n\n{tables}\n",
        description=f"Terms of {run_name}",
    )

"""Building blocks of reports: self-contained HTML pages, tables, charts and links."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence

from matplotlib.figure import Figure
from mlflow import MlflowClient

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222;
  background: #fff }}
.verdict {{ font-size: 1.15rem }} pre, code {{ font-size: .9em; overflow-wrap: anywhere; white-space: pre-wrap }}
table {{ border-collapse: collapse; margin: 1rem 0 }} th, td {{ padding: .3rem .8rem; text-align: right }}
th {{ border-bottom: 2px solid #444 }} td {{ border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }} svg {{ width: 100%; height: auto }}
</style>
{body}
</html>
"""


def html_page(title: str, body: str) -> str:
    """Self-contained HTML page."""
    return _PAGE.format(title=html.escape(title), body=body.strip())


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML table of text; the cells are escaped."""
    head = "".join(f"<th>{html.escape(column)}" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}" for text in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table of text."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def inline_svg(figure: Figure) -> str:
    """SVG element of a figure, for an HTML page."""
    text = render_figure(figure, "svg").decode()
    return text[text.index("<svg") :]


def render_figure(figure: Figure, kind: str) -> bytes:
    """Render a figure as an image file of a kind such as `png`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def artifact_key(kind: str, run_name: str) -> str:
    """Key of a Prefect artifact: lower-case letters, digits and dashes only.

    >>> artifact_key("report", "My_run.2")
    'report-my-run-2'
    """
    return f"{kind}-" + re.sub("[^a-z0-9]+", "-", run_name.lower()).strip("-")


def mlflow_artifact_link(client: MlflowClient, run_id: str, artifact: str) -> str:
    """Markdown link to an artifact of an MLflow run, or the run's ID if the tracking store has no web page."""
    run = client.get_run(run_id)
    page = f"experiments/{run.info.experiment_id}/runs/{run_id}/artifacts/{artifact}"
    uri = client.tracking_uri
    return f"[MLflow]({uri.rstrip('/')}/#/{page})" if uri.startswith("http") else f"MLflow run {run_id}"

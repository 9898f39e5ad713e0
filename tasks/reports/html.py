"""Building blocks of reports: self-contained HTML pages, tables, charts and links."""

from __future__ import annotations

import base64
import gzip
import html
import io
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow import MlflowClient
from prefect.runtime import flow_run

from blocks.terminal import escape_terminal
from blocks.urls import hide_credentials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tasks.reports.charts import Chart

# Tag that MLflow shows as the description of a run, in Markdown.
DESCRIPTION_TAG = "mlflow.note.content"

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
{style}
</style>
{body}
</html>
"""


def html_page(title: str, body: str) -> str:
    """Self-contained HTML page, light or dark like the reader's system and light on paper."""
    return _PAGE.format(title=html.escape(title), style=_asset("page.css"), body=body.strip())


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML table of text; the cells are escaped."""
    head = "".join(f"<th>{html.escape(column)}" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}" for text in row) for row in rows)
    return f'<div class="table"><table><tr>{head}{body}</table></div>'


def html_section(title: str, *parts: str, intro: str = "") -> str:
    """Section of a page with a title, a paragraph that introduces it and its parts; empty without parts."""
    content = "\n".join(filter(None, parts))
    if not content:
        return ""
    paragraph = f"<p>{html.escape(intro)}</p>\n" if intro else ""
    return f"<section><h2>{html.escape(title)}</h2>\n{paragraph}{content}</section>"


def html_list(sentences: Sequence[str]) -> str:
    """HTML list of sentences; empty without any."""
    return "<ul>" + "".join(f"<li>{html.escape(text)}" for text in sentences) + "</ul>" if sentences else ""


def copyable(text: str, label: str) -> str:
    """Text with a label, on a line of its own, with a button that copies it."""
    return (
        f'<div class="copyable"><span class="muted">{html.escape(label)}</span><code>{html.escape(text)}</code>'
        '<button type="button">copy</button></div>'
    )


def html_charts(charts: Iterable[Chart | None]) -> str:
    """Grid of interactive charts, which `page_script` draws; empty without any."""
    figures = "\n".join(_chart(chart) for chart in charts if chart)
    return f'<div class="charts">{figures}</div>' if figures else ""


def page_script(*, has_charts: bool) -> str:
    """Script of a page with copyable texts or charts; with charts, it contains Plotly's library, compressed."""
    library = f'<script id="plotly" type="text/plain">{_compressed_plotly()}</script>\n' if has_charts else ""
    return f"{library}<script>\n{_asset('page.js')}</script>"


def inline_svg(figure: Figure) -> str:
    """SVG element of a figure, for an HTML page."""
    text = render_figure(figure, "svg").decode()
    return text[text.index("<svg") :]


def render_figure(figure: Figure, kind: str) -> bytes:
    """Render a figure as an image file of a kind such as `png`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def escape_markdown(text: str) -> str:
    r"""Escape a text for a line of Markdown, so that the page shows the text itself and no element or link.

    >>> print(escape_markdown("a_b <i> [x](javascript:y)"))
    a\_b &lt;i&gt; \[x\](javascript:y)
    """
    text = escape_terminal(html.escape(" ".join(text.split()), quote=False))
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)


def markdown_code(text: str) -> str:
    """Text as code within a line of Markdown."""
    return f"`{escape_terminal(' '.join(text.split())).replace('`', chr(39))}`"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table of text; the cells are escaped."""
    lines = [[escape_markdown(cell) for cell in line] for line in (columns, *rows)]
    lines.insert(1, ["---"] * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def artifact_key(kind: str, run_name: str) -> str:
    """Key of a Prefect artifact: lower-case letters, digits and dashes only.

    >>> artifact_key("report", "My_run.2")
    'report-my-run-2'
    """
    return f"{kind}-" + re.sub("[^a-z0-9]+", "-", run_name.lower()).strip("-")


def flow_run_link() -> str:
    """Markdown link to the page of the flow run in Prefect; empty outside a flow run or without a server's web page."""
    url = hide_credentials(flow_run.get_flow_run_ui_url() or "")
    return f"Prefect: [{escape_markdown(flow_run.get_name() or url)}]({url})" if flow_run.get_id() and url else ""


def mlflow_artifact_link(client: MlflowClient, run_id: str, artifact: str) -> str:
    """Markdown link to an artifact of an MLflow run, or the run's ID if the tracking store has no web page."""
    run = client.get_run(run_id)
    page = f"experiments/{run.info.experiment_id}/runs/{run_id}/artifacts/{artifact}"
    uri = client.tracking_uri
    return f"[MLflow]({uri.rstrip('/')}/#/{page})" if uri.startswith("http") else f"MLflow run {run_id}"


def _chart(chart: Chart) -> str:
    title, reading = html.escape(chart.title), html.escape(chart.reading)
    # "</script>" in a name would end the element.
    spec = str(chart.figure.to_json()).replace("<", "\\u003c")
    kind = "chart wide" if chart.is_wide else "chart"
    return (
        f'<figure class="{kind}"><figcaption><b>{title}</b><br>{reading}</figcaption>'
        f'<div class="plot" role="img" aria-label="{title}" style="height: {chart.figure.layout.height}px"></div>'
        f'<script type="application/json">{spec}</script></figure>'
    )


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@cache
def _compressed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()

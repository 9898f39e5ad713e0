"""Section of a report with examples before and after training: completions, their scores and flagged parts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tasks.reports.html import html_section, html_table
from tasks.reports.tables import format_figure
from tasks.training.examples import Example, TermFlag

_INTRO = (
    "Held-out prompts with completions before and after training, sampled at temperature 1 or, if the run trains on "
    "rollouts, with the settings of its rollouts. Completions of the data may be cut off at its maximum length; of "
    "several for a prompt, the one with the most marked parts is shown. A term objects to the marked parts; the reason "
    "is in the list below them. For the score of a term, lower is better."
)
_PAIRS_INTRO = (
    "Held-out prompts with the chosen and the rejected completion of the data. The margin is the reward of the chosen "
    "completion under the loss minus that of the rejected one: higher is better."
)


def examples_section(examples: Mapping[int, Sequence[Example]]) -> str:
    """Section of the examples at the first and the last evaluation that stored them; empty without any."""
    if not examples:
        return ""
    columns = [(f"step {step}", examples[step]) for step in sorted({min(examples), max(examples)})]
    is_pairs = any(example.other_title == "rejected" for _, shown in columns for example in shown)
    return html_section("Examples before and after", *example_rows(columns), intro=_PAIRS_INTRO if is_pairs else _INTRO)


def example_rows(columns: Sequence[tuple[str, Sequence[Example]]]) -> list[str]:
    """Return an HTML block for each position at which all lists have the same prompt; each list is a column."""
    blocks: list[str] = []
    for shown in zip(*(examples for _, examples in columns), strict=False):
        titles = [title for title, _ in columns]
        first = shown[0]
        if any(example.prompt != first.prompt for example in shown):
            continue  # the data differ between the columns
        is_same = len({example.completion for example in shown}) == 1  # as in preference pairs
        cells = list(zip(titles, shown, strict=True))
        if is_same:
            cells = [("chosen" if first.other_title == "rejected" else ", ".join(titles), first)]
        texts = "".join(
            f"<div><b>{html.escape(title)}</b>{_completion(example.completion, example.flags)}</div>"
            for title, example in cells
        )
        if first.other:
            title, other = html.escape(first.other_title), _completion(first.other, first.other_flags)
            texts += f"<div><b>{title}</b>{other}</div>"
        blocks.append(
            f'<div class="example"><pre class="prompt">{html.escape(first.prompt)}</pre>'
            f'<div class="columns">{texts}</div>{_scores(titles, shown)}</div>'
        )
    return blocks


def marked_text(text: str, flags: Sequence[TermFlag]) -> str:
    """Text as HTML, with its flagged parts marked; overlapping flags share a mark."""
    edges = sorted({0, len(text), *(edge for flag in flags for edge in (flag.start, flag.end))})
    parts: list[str] = []
    for start, end in pairwise(edges):
        reasons = [_reason(flag) for flag in flags if flag.start <= start and end <= flag.end]
        part = html.escape(text[start:end])
        parts.append(f'<mark title="{html.escape("; ".join(reasons))}">{part}</mark>' if reasons else part)
    return "".join(parts)


def _completion(text: str, flags: Sequence[TermFlag]) -> str:
    items = "".join(
        f"<li><code>{html.escape(text[flag.start : flag.end])}</code> {html.escape(_reason(flag))}" for flag in flags
    )
    flagged = f'<ul class="muted">{items}</ul>' if items else ""
    return f"<pre>{marked_text(text, flags)}</pre>{flagged}"


def _reason(flag: TermFlag) -> str:
    return f"{flag.term}: {flag.reason}"


def _scores(titles: Sequence[str], shown: Sequence[Example]) -> str:
    names = list(dict.fromkeys(name for example in shown for name in example.scores))
    rows = [[name, *(_score(example, name) for example in shown)] for name in names]
    return html_table(("score", *titles), rows) if rows else ""


def _score(example: Example, name: str) -> str:
    """Score of an example; if the term had nothing to check, says so, after the value unless it is 0."""
    value = example.scores.get(name)
    if value is None:
        return ""
    if name in example.unchecked:
        return "nothing to check" if value == 0 else f"{format_figure(value)}, nothing to check"
    return format_figure(value)

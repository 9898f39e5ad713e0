"""First batch of a run with its loss weights: printed in the terminal, and a page of the run.

The colors in the terminal are tinker-cookbook's: green for a positive weight, yellow for 0, red for a negative one. The
page leaves tokens of weight 0 plain. The weights of sampled data are its advantages.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from rich.text import Text
from tinker_cookbook.display import to_ints
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.storage import RunDirectory
from blocks.terminal import TextConsole, escape_terminal
from objectives.batch import Batch, unpack
from objectives.labels import MEMBER, NONE, PROMPT, number_prompts
from tasks.common.task import retried_task
from tasks.reports.html import (
    artifact_key,
    escape_markdown,
    html_page,
    html_table,
    markdown_code,
    markdown_table,
    mlflow_artifact_link,
)
from tasks.training.tracking.metrics import MetricsLog

FIRST_BATCH = "first_batch.html"

# Datums on the page, so that a large batch of long sequences stays readable.
_MOST_DATUMS = 32
_COLUMNS = ("datum", "tokens", "trained tokens", "smallest weight", "largest weight")
_PAIR, _DESIRABLE = "pair", "desirable"
_SIDES = {1: "chosen", 0: "rejected"}

_BODY = """<h1>First batch of {name}</h1>
<p>Green tokens have a positive loss weight, red ones a negative one, and plain ones 0; hover over a token for its
weight. The weights of sampled data are its advantages.{omitted}</p>
{table}
{datums}
"""


@dataclass(frozen=True, slots=True)
class WeightedDatum:
    """Tokens of a datum with their loss weights, for display.

    Attributes:
        title: its place in the batch, such as `pair 3, chosen`.
        tokens: its input tokens and its last target.
        weights: loss weight of each token; 0 for the first token, which is never a target.
    """

    title: str
    tokens: Sequence[int]
    weights: Sequence[float]

    def cells(self) -> tuple[str, ...]:
        trained = [weight for weight in self.weights if weight]
        low, high = (f"{limit(trained):.4g}" if trained else "" for limit in (min, max))
        return self.title, str(len(self.tokens)), str(len(trained)), low, high


def weighted_datums(batch: Batch, tokenizer: Tokenizer) -> list[WeightedDatum]:
    """Return the datums of a batch; the weights of several targets at one position are added up."""
    weights_DT = batch.weights_DT if batch.advantages_DT is None else batch.advantages_DT
    if weights_DT.ndim > 1:
        weights_DT = weights_DT.sum(-1)
    datums: list[WeightedDatum] = []
    packed = (unpack(weights_DT, batch.offsets_D), unpack(batch.target_tokens_DT, batch.offsets_D))
    for index, (datum, weights, targets) in enumerate(zip(batch.datums, *packed, strict=True)):
        inputs = [token for chunk in datum.model_input.chunks for token in to_ints(chunk, tokenizer)]
        last = int(targets[-1].flatten()[0])
        datums.append(WeightedDatum(_title(batch, index), [*inputs, last], [0.0, *weights.tolist()]))
    return datums


def first_group(batch: Batch, datums: Sequence[WeightedDatum]) -> list[WeightedDatum]:
    """Return the datums to print: the first pair, two rollouts of the first prompt, or its first two completions.

    The two rollouts have the greatest and the smallest advantage of a token; if one rollout has both, it is printed
    alone.
    """
    if _PAIR in batch.labels_D:
        return _with_first_label(batch, datums, _PAIR)
    if PROMPT in batch.labels_D and batch.advantages_DT is not None:
        rollouts = _with_first_label(batch, datums, PROMPT)
        best = max(rollouts, key=lambda datum: max(datum.weights))
        worst = min(rollouts, key=lambda datum: min(datum.weights))
        return [best] if best is worst else [best, worst]
    numbers = number_prompts(batch).tolist()
    return [datum for datum, number in zip(datums, numbers, strict=True) if number == numbers[0]][:2]


def _with_first_label(batch: Batch, datums: Sequence[WeightedDatum], label: str) -> list[WeightedDatum]:
    labels = batch.labels_D[label].tolist()
    return [datum for datum, value in zip(datums, labels, strict=True) if value == labels[0]]


def print_datums(run_name: str, datums: Sequence[WeightedDatum], tokenizer: Tokenizer, file: TextIO) -> None:
    """Print datums, in color on a terminal."""
    console = TextConsole(file=file)
    for datum in datums:
        title, num_tokens, num_trained, low, high = datum.cells()
        weights = f"loss weights from {low} to {high}" if low else "all loss weights are 0"
        if low and low == high:
            weights = f"each with the loss weight {low}"
        console.print(f"First batch of {run_name}: {title}, {num_trained} of {num_tokens} tokens trained, {weights}")
        console.print(styled_text(datum, tokenizer))


def styled_text(datum: WeightedDatum, tokenizer: Tokenizer) -> Text:
    """Text of a datum in tinker-cookbook's colors. Control characters in the data are shown and have no effect."""
    text = Text()
    for sign, decoded in _runs(datum, tokenizer, [(weight > 0) - (weight < 0) for weight in datum.weights]):
        text.append(escape_terminal(decoded), {1.0: "green", 0.0: "yellow", -1.0: "red"}[sign])
    return text


def first_batch_page(run_name: str, datums: Sequence[WeightedDatum], tokenizer: Tokenizer) -> str:
    """Self-contained page of a batch."""
    shown = datums[:_MOST_DATUMS]
    omitted = f" The page has the first {len(shown)} of {len(datums)} datums." if len(shown) < len(datums) else ""
    texts = "\n".join(f"<h2>{html.escape(datum.title)}</h2><pre>{_spans(datum, tokenizer)}</pre>" for datum in shown)
    table = html_table(_COLUMNS, [datum.cells() for datum in shown])
    return html_page(
        f"First batch of {run_name}",
        _BODY.format(name=html.escape(run_name), omitted=omitted, table=table, datums=texts),
    )


@retried_task(name="first-batch")
def write_first_batch(
    directory: RunDirectory,
    log: MetricsLog,
    run_name: str,
    datums: Sequence[WeightedDatum],
    tokenizer: Tokenizer,
) -> None:
    """Save the page of the first batch in the run's directory and in MLflow, and link it on the run's page."""
    page = first_batch_page(run_name, datums, tokenizer)
    directory.write_bytes(FIRST_BATCH, page.encode())
    log.client.log_text(log.run_id, page, FIRST_BATCH)
    if flow_run.get_id():
        location = f"{directory.location}/{FIRST_BATCH}"
        link = mlflow_artifact_link(log.client, log.run_id, FIRST_BATCH)
        table = markdown_table(_COLUMNS, [datum.cells() for datum in datums[:_MOST_DATUMS]])
        name, file = escape_markdown(run_name), markdown_code(location)
        create_markdown_artifact(
            key=artifact_key("first-batch", run_name),
            markdown=f"# First batch of {name}\n\nIts text is in {file}, and in {link}.\n\n{table}\n",
            description=f"Loss weights of the first batch of {name}",
        )


def _title(batch: Batch, index: int) -> str:
    labels = {name: int(values[index]) for name, values in batch.labels_D.items()}
    if _DESIRABLE in labels:
        side = _SIDES.get(labels[_DESIRABLE], "")
        return f"pair {labels[_PAIR]}, {side}" if labels.get(_PAIR, -1) >= 0 else f"answer {index} without a pair"
    if batch.advantages_DT is not None:
        member = labels.get(MEMBER, NONE)
        return f"prompt {labels.get(PROMPT, 0)}, rollout {index if member == NONE else member}"
    return f"example {index}"


def _runs(datum: WeightedDatum, tokenizer: Tokenizer, values: Sequence[float]) -> Iterator[tuple[float, str]]:
    """Texts of consecutive tokens with the same value, decoded together so that no character is torn."""
    for value, tokens in groupby(zip(values, datum.tokens, strict=True), key=lambda pair: pair[0]):
        yield value, str(tokenizer.decode([token for _, token in tokens]))


def _spans(datum: WeightedDatum, tokenizer: Tokenizer) -> str:
    largest = max((abs(weight) for weight in datum.weights), default=0.0) or 1.0
    return "".join(
        f'<span title="{weight:.4g}"{_style(weight / largest)}>{html.escape(text)}</span>'
        for weight, text in _runs(datum, tokenizer, datum.weights)
    )


def _style(share: float) -> str:
    """Background of a weight, from its share of the largest one."""
    if not share:
        return ""
    color = "60, 160, 60" if share > 0 else "210, 60, 60"
    return f' style="background: rgba({color}, {0.25 + 0.5 * abs(share):.2f})"'

"""The models of a Tinker service: context, price, learning rate and chat format, for the terminal or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tinker_cookbook.model_info import get_model_attributes

from blocks.errors import ConfigError
from flows.blocks_of import service_at
from flows.learning_rate import is_local, recommended_rate
from flows.prices import price_of, priced_models
from tasks.renderer import recommended_renderers

_COLUMNS = ("model", "context", "prefill", "sample", "train", "auto rate", "renderer")


def show_models(base_url: str, as_json: bool) -> None:
    """Print what the service offers, or where none is named and no key is there what the project has prices of.

    Raises:
        ServiceError: the service that is named does not answer.
    """
    rows = list(_rows(base_url))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="Models: context in tokens, dollars per million tokens", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("model", "renderer") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(_written(row[column.replace(" ", "_")])) for column in _COLUMNS))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _rows(base_url: str) -> Iterator[dict[str, Any]]:
    service = service_at(base_url)
    listed = priced_models()
    offered = service.context_lengths() if service else {model: _context_in(model) for model in listed}
    for model, context in offered.items():
        price = price_of(model, base_url) if service else listed[model]
        known = recommended_renderers(model)
        yield {
            "model": model,
            "context": context,
            "prefill": price.prefill if price else None,
            "sample": price.sample if price else None,
            "train": price.train if price else None,
            "auto_rate": _rate(model) if known or is_local(model) else None,
            "renderer": known[0] if known else None,
            "vision": get_model_attributes(model).is_vl if known else None,
        }


def _context_in(model: str) -> int | None:
    """What a name such as `MODEL:peft:131072` says; the others' the service alone knows."""
    suffix = model.rpartition(":peft:")[2]
    return int(suffix) if suffix.isdigit() else None


def _rate(model: str) -> float | None:
    try:
        return recommended_rate(model)
    except ConfigError:
        return None


def _written(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)

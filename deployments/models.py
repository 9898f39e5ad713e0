"""Models of a Tinker service with size, type, context, prices, learning rate and renderer, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from tinker_cookbook.model_info import ModelAttributes, get_model_attributes

from blocks import TinkerService
from blocks.errors import ConfigError
from blocks.terminal import TextConsole
from flows.config.learning_rate import is_local, recommended_rate
from flows.runs.blocks import service_at
from flows.runs.prices import FREE, PRICES_DATE, Price, price_of, priced_models
from tasks.common.renderers import recommended_renderers
from tasks.rl.health import is_mixture

_COLUMNS = ("model", "size", "type", "context", "prefill", "sample", "train", "auto rate", "renderer")
_TEXTS = ("model", "size", "type", "renderer")
# Named models of the local engine: size and context.
_LOCAL = {"tiny": ("35K", 4096), "smollm2-135m": ("135M", 8192)}


def show_models(base_url: str, as_json: bool) -> None:
    """Print the models of the local engine and of the selected service, or else of the hosted service.

    Raises:
        ServiceError: the selected service does not respond.
    """
    service = service_at(base_url)
    rows = list(_rows(service))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(
        title=f"Models: context in tokens, dollars per million tokens (hosted service: prices of {PRICES_DATE})",
        title_justify="left",
        caption=None if service else "For missing context lengths, ask a service: set TINKER_API_KEY or --base-url.",
        caption_justify="left",
    )
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _TEXTS else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_format(row[column.replace(" ", "_")]) for column in _COLUMNS))
    TextConsole(width=None if sys.stdout.isatty() else 160, soft_wrap=False).print(table)


def _rows(service: TinkerService | None) -> Iterator[dict[str, Any]]:
    offered: set[str] = set()
    if service:
        for model, context in service.context_lengths().items():
            offered.add(model)
            yield _row(model, context, price_of(model, service.resolved_url))
    for model, (_, context) in _LOCAL.items():
        if model not in offered:
            yield _row(model, context, FREE)
    if service:
        return
    for model, price in priced_models().items():
        yield _row(model, _context_in_name(model), price)


def _row(model: str, context: int | None, price: Price | None) -> dict[str, Any]:
    renderers = recommended_renderers(model)
    size = kind = vision = None
    if model in _LOCAL:
        size, kind = _LOCAL[model][0], "local"
    elif renderers:
        attributes = get_model_attributes(model)
        size, kind, vision = attributes.size_str, _kind(model, attributes), attributes.is_vl
    return {
        "model": model,
        "size": size,
        "type": kind,
        "context": context,
        "prefill": price.prefill if price else None,
        "sample": price.sample if price else None,
        "train": price.train if price else None,
        "auto_rate": _auto_rate(model) if renderers or is_local(model) else None,
        "renderer": renderers[0] if renderers else None,
        "vision": vision,
    }


def _kind(model: str, attributes: ModelAttributes) -> str:
    """Return the type of a model: chat or base, dense or mixture of experts, and inputs besides text."""
    words = ["chat" if attributes.is_chat else "base", "mixture" if is_mixture(model) else "dense"]
    inputs = [name for name, has in (("vision", attributes.is_vl), ("audio", attributes.is_audio_in)) if has]
    return ", ".join([*words, *inputs])


def _context_in_name(model: str) -> int | None:
    """Return the context length in a name such as `MODEL:peft:131072`; None if the name has none."""
    suffix = model.rpartition(":peft:")[2]
    return int(suffix) if suffix.isdigit() else None


def _auto_rate(model: str) -> float | None:
    try:
        return recommended_rate(model)
    except ConfigError:
        return None


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)

"""The renderers that a config names, wherever its builders take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel


def renderer_names(config: BaseModel) -> list[str]:
    """Each of them once.

    >>> from flows.config import BuilderConfig
    >>> renderer_names(BuilderConfig(builder="a:B", params={"common_config": {"renderer_name": "llama3"}}))
    ['llama3']
    """
    return list(dict.fromkeys(name for name in values_of(config.model_dump(), "renderer_name") if name))


def values_of(fields: Any, name: str) -> Iterator[Any]:
    """What the fields of this name say, also those in dicts, lists and dotted paths."""
    if isinstance(fields, Mapping):
        for key, value in fields.items():
            if str(key).rpartition(".")[2] == name:
                yield value
            else:
                yield from values_of(value, name)
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        for each in fields:
            yield from values_of(each, name)

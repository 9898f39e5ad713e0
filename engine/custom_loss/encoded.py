"""Arguments of a graph's nodes, as plain data and back; the encoding is that of tinker's ``CustomLossNode``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import RequestError

_MAX_DEPTH = 16
_MAX_ITEMS = 1024
_MAX_TEXT = 256
_MAX_INT = 2**53

_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_MEMORY_FORMATS = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.memory_format)
}
_NAMED: dict[str, dict[str, Any]] = {
    "float": {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")},
    "dtype": _DTYPES,
    "layout": {"strided": torch.strided},
    "memory_format": _MEMORY_FORMATS,
}


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of another node."""

    name: str


def decode(encoded: Any, known: Callable[[str], bool], depth: int = 0) -> Any:
    """The argument that ``encoded`` stands for, with `Ref` in the place of other nodes.

    Args:
        known: whether a node of this name came before.

    Raises:
        RequestError: no argument of this encoding, or one beyond the limits.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"an argument is nested more than {_MAX_DEPTH} deep")
    if encoded is None or isinstance(encoded, bool | float):
        return encoded
    if isinstance(encoded, int):
        if abs(encoded) > _MAX_INT:
            raise RequestError(f"the number {encoded:.3g} is beyond {_MAX_INT}")
        return encoded
    if isinstance(encoded, str):
        if len(encoded) > _MAX_TEXT:
            raise RequestError(f"a text has {len(encoded)} characters, more than {_MAX_TEXT}")
        return encoded
    if isinstance(encoded, list):
        return _items(encoded, known, depth)
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise RequestError(f"the argument {str(encoded)[:100]} is no object of one key")
    ((kind, value),) = encoded.items()
    return _tagged(kind, value, known, depth)


def resolve(argument: Any, values: dict[str, Any]) -> Any:
    """The argument with each `Ref` replaced by its node's value."""
    match argument:
        case Ref(name):
            return values[name]
        case list():
            return [resolve(each, values) for each in argument]
        case tuple():
            return tuple(resolve(each, values) for each in argument)
        case dict():
            return {key: resolve(each, values) for key, each in argument.items()}
        case slice():
            return slice(*(resolve(each, values) for each in (argument.start, argument.stop, argument.step)))
        case _:
            return argument


def _tagged(kind: str, value: Any, known: Callable[[str], bool], depth: int) -> Any:
    match kind, value:
        case "ref", str():
            if not known(value):
                raise RequestError(f"it refers to {value!r}, and no node of that name comes before it")
            return Ref(value)
        case "tuple", list():
            return tuple(_items(value, known, depth))
        case "dict", dict():
            return dict(zip(value, _items(list(value.values()), known, depth), strict=True))
        case "slice", list() if len(value) == 3:
            return slice(*_items(value, known, depth))
        case "ellipsis", True:
            return Ellipsis
        case "device", str():
            return torch.device("cpu")  # where the graph runs, whatever device the client has
        case _, str() if value in _NAMED.get(kind, {}):
            return _NAMED[kind][value]
    raise RequestError(f"the argument {{{kind[:50]!r}: {str(value)[:50]!r}}} is unknown")


def _items(encoded: list[Any], known: Callable[[str], bool], depth: int) -> list[Any]:
    if len(encoded) > _MAX_ITEMS:
        raise RequestError(f"an argument has {len(encoded)} items, more than {_MAX_ITEMS}")
    return [decode(each, known, depth + 1) for each in encoded]

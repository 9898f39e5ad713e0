"""Arguments of graph nodes, decoded from the encoding of tinker's ``CustomLossNode``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import RequestError

_MAX_DEPTH = 16
_MAX_ITEMS = 1024
_MAX_TEXT = 256
_MAX_INT = 2**53

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.memory_format)
}
_CONSTANTS: Mapping[str, Mapping[str, object]] = {
    "float": {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")},
    "dtype": _DTYPES,
    "layout": {"strided": torch.strided},
    "memory_format": _MEMORY_FORMATS,
}


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to another node's value."""

    name: str


def decode(encoded: Any, is_known: Callable[[str], bool], depth: int = 0) -> Any:
    """Decode an argument, with a `Ref` for each reference to another node.

    Args:
        is_known: returns True for names of earlier nodes.

    Raises:
        RequestError: the encoding is invalid, or exceeds the limits; the message is a clause.
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
        return _decode_items(encoded, is_known, depth)
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise RequestError(f"the argument {str(encoded)[:100]} is not an object with one key")
    ((kind, value),) = encoded.items()
    return _decode_tagged(kind, value, is_known, depth)


def resolve(argument: Any, values: dict[str, Any]) -> Any:
    """Replace each `Ref` in an argument by its node's value."""
    match argument:
        case Ref(name):
            return values[name]
        case list():
            return [resolve(item, values) for item in argument]
        case tuple():
            return tuple(resolve(item, values) for item in argument)
        case dict():
            return {key: resolve(item, values) for key, item in argument.items()}
        case slice():
            return slice(*(resolve(bound, values) for bound in (argument.start, argument.stop, argument.step)))
        case _:
            return argument


def _decode_tagged(kind: str, value: object, is_known: Callable[[str], bool], depth: int) -> Any:
    match kind, value:
        case "ref", str():
            if not is_known(value):
                raise RequestError(f"it refers to {value!r}, and no earlier node has this name")
            return Ref(value)
        case "tuple", list():
            return tuple(_decode_items(value, is_known, depth))
        case "dict", dict():
            return dict(zip(value, _decode_items(list(value.values()), is_known, depth), strict=True))
        case "slice", list() if len(value) == 3:
            return slice(*_decode_items(value, is_known, depth))
        case "ellipsis", True:
            return Ellipsis
        case "device", str():
            return torch.device("cpu")  # graphs run on the CPU, independent of the client's device
        case _, str() if value in _CONSTANTS.get(kind, {}):
            return _CONSTANTS[kind][value]
    raise RequestError(f"the argument {{{kind[:50]!r}: {str(value)[:50]!r}}} is unknown")


def _decode_items(encoded: list[Any], is_known: Callable[[str], bool], depth: int) -> list[Any]:
    if len(encoded) > _MAX_ITEMS:
        raise RequestError(f"an argument has {len(encoded)} items, more than {_MAX_ITEMS}")
    return [decode(item, is_known, depth + 1) for item in encoded]

"""Check of the values of a config, which is recorded as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_json_values(value: Any, path: str = "") -> None:
    """Check the numbers and texts of plain data, which JSON readers and databases must be able to store.

    Raises:
        ValueError: a number is not finite or has more than 64 bits, a text is not valid Unicode, or a value is binary.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and not _is_unicode(key):
                raise ValueError(f"the field {key[:100]!a} is not valid Unicode: remove the lone surrogate")
            check_json_values(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            check_json_values(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path!r} is {value}, but input should be a finite number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{path!r} is an integer of more than 64 bits: use a smaller one")
    elif isinstance(value, str) and not _is_unicode(value):
        raise ValueError(f"{path!r} is {value[:100]!a}, which is not valid Unicode: remove the lone surrogate")
    elif isinstance(value, bytes | bytearray):
        raise ValueError(f"{path!r} is binary: write it as text")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

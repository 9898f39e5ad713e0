"""Paths in texts of configs."""

from __future__ import annotations

from pathlib import Path


def path_of(text: str) -> Path | None:
    """Return the path that a text names, whether or not it exists; None if the text cannot be a path.

    >>> path_of("rows.jsonl")
    PosixPath('rows.jsonl')
    >>> path_of("~no-such-user/rows.jsonl") or path_of("a\\0b") or path_of("a" * 5000)
    """
    try:
        path = Path(text).expanduser()
        path.resolve().exists()
    except (OSError, ValueError, RuntimeError):  # ValueError: a NUL; RuntimeError: ~name of an unknown user
        return None
    return path

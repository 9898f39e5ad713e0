"""Problems to sample answers to, from a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path

from blocks.errors import ConfigError, reason


def read_rows(path: str, required: tuple[str, ...], limit: int | None = None) -> list[dict[str, str]]:
    """The rows of a JSONL file, or the first `limit` of them, with their values as text.

    Raises:
        ConfigError: it cannot be read, has no rows, or a row lacks a field that is required.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The data file {path} could not be read ({reason(error)}): check its path.") from error
    rows: list[dict[str, str]] = []
    for number, line in enumerate(lines[:limit], start=1):
        try:
            row = json.loads(line)
            rows.append({key: str(value) for key, value in row.items()} | {key: str(row[key]) for key in required})
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"Line {number} of {path} is no JSON object with {' and '.join(required)} ({reason(error)}): mend it."
            ) from error
    if not rows:
        raise ConfigError(f"The data file {path} has no rows: give one that has.")
    return rows

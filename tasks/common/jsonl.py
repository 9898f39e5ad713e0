"""Readers of JSONL files (rows of data, records of a run), and templates that are filled from rows."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from blocks.errors import ConfigError, reason
from blocks.storage import RunDirectory

T = TypeVar("T")

QUESTION = "{question}"

_FIELD = re.compile(r"\{(\w+)\}")
# Escape of half a surrogate pair in JSON.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

logger = logging.getLogger(__name__)


def read_rows(path: str, required: tuple[str, ...], limit: int | None = None) -> list[dict[str, str]]:
    """Read the rows of a JSONL data file, or its first `limit` rows: the text of each field that is not null.

    Raises:
        ConfigError: the file cannot be read, has no rows, or a row lacks a required field.
    """

    def parse(row: dict[str, Any]) -> dict[str, str]:
        if missing := [key for key in required if key not in row]:
            raise ValueError(f"{missing[0]} is missing")
        if null := [key for key in required if row[key] is None]:
            raise ValueError(f"{null[0]} is null")
        return {key: str(value) for key, value in row.items() if value is not None}

    return parse_rows(path, parse, " and ".join(required) or "fields", limit)


def parse_rows(path: str, parse: Callable[[Any], T], content: str, limit: int | None = None) -> list[T]:
    """Parse the rows of a JSONL data file, or its first `limit` rows.

    Args:
        parse: function of the JSON value of a row; raises an error if the row is invalid.
        content: description of the fields of a row for the error message.

    Raises:
        ConfigError: the file cannot be read, has no rows, or a row cannot be parsed.
    """
    try:
        lines = _lines(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The data file {path} could not be read ({reason(error)}): check its path.") from error

    rows: list[T] = []
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)

    def parse_valid(text: str) -> T:
        row = decoder.decode(text)
        _check_unicode(text, row)
        return parse(row)

    for number, row in _parse_lines(lines[:limit], parse_valid):
        if isinstance(row, Exception):
            raise ConfigError(
                f"Line {number} of {path} is not a JSON object with {content} ({reason(row)}): fix it."
            ) from row
        rows.append(row)
    if not rows:
        raise ConfigError(f"The data file {path} has no rows: use a file with at least one.")
    return rows


def read_jsonl(directory: RunDirectory, name: str, parse: Callable[[Any], T]) -> list[T]:
    """Read the records of a JSONL file in a run's directory; empty if the file does not exist.

    A crash can tear a line, so a line that `parse` cannot read is skipped with a warning.
    """
    lines = _lines((directory.read_bytes(name) or b"").decode(errors="replace"))
    records: list[T] = []
    for number, record in _parse_lines(lines, lambda line: parse(json.loads(line))):
        if isinstance(record, Exception):
            logger.warning("Line %d of %s/%s is not a complete record: skipping it.", number, directory.location, name)
        else:
            records.append(record)
    return records


def _lines(text: str) -> list[str]:
    """Split at line feeds only: JSON strings may contain other separators, such as U+2028."""
    return text.removesuffix("\n").split("\n") if text else []


def _parse_lines(lines: Sequence[str], parse: Callable[[str], T]) -> Iterator[tuple[int, T | Exception]]:
    """Line numbers from 1, each with the parsed line or the error of parsing it."""
    for number, line in enumerate(lines, start=1):
        try:
            yield number, parse(line)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            yield number, error


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinity, which are no JSON; Python would read them, and the text of a field would be `nan`."""
    raise ValueError(f"{name} is not a value of JSON")


def _finite(digits: str) -> float:
    """Read a number; refuse one that Python would read as infinity."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number


def _check_unicode(text: str, row: object) -> None:
    """Refuse half a surrogate pair, which no tokenizer or database accepts."""
    if _SURROGATE.search(text):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{error.object[error.start]!a} is not valid Unicode") from error


def fill(template: str, row: Mapping[str, str]) -> str:
    """Fill a template with the fields of a row; other braces stay unchanged.

    >>> fill('{question} Say it as {"json": 1}.', {"question": "Where?"})
    'Where? Say it as {"json": 1}.'
    """
    return _FIELD.sub(lambda match: row.get(match[1], match[0]), template)

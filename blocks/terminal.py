"""Text in the terminal and in logs, with control characters escaped."""

from __future__ import annotations

import logging
import re
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text

# Control characters but newline and tab, and characters that reverse the direction of a text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_terminal(text: str) -> str:
    r"""Replace control characters by their escapes, so that a text is shown and has no effect.

    >>> escape_terminal("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda match: ascii(match.group())[1:-1], text)


def escape_json(text: str) -> str:
    r"""Replace the characters in JSON that `escape_terminal` replaces, so that its meaning stays the same.

    >>> escape_json('"ab"')
    '"a\\u009bb"'
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def print_notice(text: str) -> None:
    """Print a text to standard error, with control characters escaped."""
    print(escape_terminal(text), file=sys.stderr, flush=True)


def escape_log_record(record: logging.LogRecord) -> bool:
    """Escape the message and the traceback of a log record, as a filter of a logger that keeps all records."""
    record.msg, record.args = escape_terminal(record.getMessage()), None
    if record.exc_info:
        record.exc_text = escape_terminal(logging.Formatter().formatException(record.exc_info))
    return True


class TextConsole(Console):
    """Console that shows each string as it is: without markup and emoji codes, and with control characters escaped.

    For colors, print a `rich.text.Text`.
    """

    def __init__(self, *, width: int | None = None, file: IO[str] | None = None, soft_wrap: bool = True) -> None:
        super().__init__(width=width, file=file, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text, also of a cell of a table; see `rich.console.Console.render_str`."""
        return super().render_str(escape_terminal(text), **options)

"""Text in the terminal and in logs, with control characters escaped."""

from __future__ import annotations

import logging
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from blocks.terminal import escape_terminal


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

"""Plain texts for the terminal; `blocks.console` has tables and colors. This module imports nothing that takes time."""

from __future__ import annotations

import re
import sys

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

"""A tokenizer that several threads may use: tinker-cookbook renders the turns of some environments in threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any

from tinker_cookbook.tokenizer_utils import Tokenizer

_METHODS = ("encode", "decode", "__call__")


def lock(tokenizer: Tokenizer) -> None:
    """Let it be used by one thread at a time, from now on, whoever holds it.

    transformers changes a fast tokenizer to encode text with or without special tokens. One that another thread is
    encoding with cannot be changed ("Already borrowed"), and one that was changed in between encodes other tokens.
    """
    kind = type(tokenizer)
    if hasattr(kind, "_is_locked"):
        return
    turn = RLock()

    def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with turn:
                return method(*args, **kwargs)

        return call

    locked = {name: in_turn(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)}
    tokenizer.__class__ = type(kind.__name__, (kind,), {**locked, "_is_locked": True})

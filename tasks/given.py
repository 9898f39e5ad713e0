"""What a run fills in of a builder's parameters: what follows from its model, and what it holds open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.renderer import find_renderer


def given(tokenizer: Tokenizer, of_run: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by the names that tinker-cookbook's builders have for them, `...` standing for any depth.

    Args:
        of_run: what the run holds open, by the names of parameters that take it.
    """
    name = tokenizer.name_or_path
    renderer = find_renderer(name, tokenizer)
    filled: dict[str, Any] = {"...model_name_for_tokenizer": name, "model_name": name, "policy_model_name": name}
    filled |= {f"...{parameter}": value for parameter, value in of_run.items()}
    return filled | ({"...renderer_name": renderer, "policy_renderer_name": renderer} if renderer else {})

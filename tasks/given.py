"""What a run fills in of a builder's parameters: what follows from its model."""

from __future__ import annotations

from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.renderer import find_renderer


def given(tokenizer: Tokenizer) -> dict[str, str]:
    """Parameters by the names that tinker-cookbook's builders have for them, `...` standing for any depth."""
    name = tokenizer.name_or_path
    renderer = find_renderer(name, tokenizer)
    filled: dict[str, str] = {"...model_name_for_tokenizer": name, "model_name": name, "policy_model_name": name}
    return filled | ({"...renderer_name": renderer, "policy_renderer_name": renderer} if renderer else {})

"""The chat format of a model: tinker-cookbook's for it, or the one that its template is written in."""

from __future__ import annotations

from contextlib import suppress

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import get_recommended_renderer_names
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError

# Of models that tinker-cookbook does not know: what tells a chat template, and a renderer that writes such chats.
_TEMPLATES = {"<|im_start|>": "qwen3_instruct", "<|start_header_id|>": "llama3"}


def recommended_renderers(model: str) -> list[str]:
    """tinker-cookbook's renderers of a model, the best one first; none of a model that it does not know."""
    with suppress(ConfigurationError, KeyError, ValueError):
        return get_recommended_renderer_names(model)
    return []


def find_renderer(model: str, tokenizer: Tokenizer) -> str | None:
    """The renderer that suits a model: tinker-cookbook's first, else by the chat template; None where that is another.

    Without a chat template it is a base model's.
    """
    if known := recommended_renderers(model):
        return known[0]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    found = [renderer for mark, renderer in _TEMPLATES.items() if mark in template]
    return (found or [None])[0] if template else "role_colon"


def renderer_of(model: str, tokenizer: Tokenizer) -> str:
    """`find_renderer`, for where one is needed.

    Raises:
        ConfigError: nobody knows it.
    """
    found = find_renderer(model, tokenizer)
    if found is None:
        raise ConfigError(
            f"Nobody says how conversations are written for {model}: set renderer_name to a renderer of "
            "tinker-cookbook, as role_colon for a model without a chat format."
        )
    return found

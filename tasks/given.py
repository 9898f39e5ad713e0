"""What a run fills in of a builder's parameters: what follows from its model."""

from __future__ import annotations

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.tokenizer_utils import Tokenizer

# Of models that tinker-cookbook does not know: what tells a chat template, and a renderer that writes such chats.
_TEMPLATES = {"<|im_start|>": "qwen3_instruct", "<|start_header_id|>": "llama3"}


def given(tokenizer: Tokenizer) -> dict[str, str]:
    """Parameters by the names that tinker-cookbook's builders have for them, `...` standing for any depth."""
    name, renderer = tokenizer.name_or_path, recommended_renderer(tokenizer)
    filled: dict[str, str] = {"...model_name_for_tokenizer": name, "model_name": name, "policy_model_name": name}
    return filled | ({"...renderer_name": renderer, "policy_renderer_name": renderer} if renderer else {})


def recommended_renderer(tokenizer: Tokenizer) -> str | None:
    """The renderer that suits a model: tinker-cookbook's first, else by the chat template; None where that is another.

    Without a chat template it is a base model's.
    """
    try:
        return get_recommended_renderer_name(tokenizer.name_or_path)
    except (ConfigurationError, KeyError, ValueError):
        template = str(getattr(tokenizer, "chat_template", None) or "")
        found = [renderer for mark, renderer in _TEMPLATES.items() if mark in template]
        return (found or [None])[0] if template else "role_colon"

"""Chat format of a model: tinker-cookbook's recommendation, or one inferred from the chat template."""

from __future__ import annotations

from contextlib import suppress

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import get_recommended_renderer_names
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError

# Renderers of models that tinker-cookbook does not know, by a marker of their chat template.
_TEMPLATES = {"<|im_start|>": "qwen3_instruct", "<|start_header_id|>": "llama3"}


def recommended_renderers(model: str) -> list[str]:
    """tinker-cookbook's renderers of a model, the best first; empty for unknown models."""
    with suppress(ConfigurationError, KeyError, ValueError):
        return get_recommended_renderer_names(model)
    return []


def find_renderer_name(model: str, tokenizer: Tokenizer) -> str | None:
    """Return the name of a model's renderer, or None if its chat template is unknown.

    tinker-cookbook's recommendation comes first, then the chat template. A model without a template is a base model.
    """
    if recommended := recommended_renderers(model):
        return recommended[0]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if not template:
        return "role_colon"
    return next((renderer for marker, renderer in _TEMPLATES.items() if marker in template), None)


def renderer_name_of(model: str, tokenizer: Tokenizer) -> str:
    """Return the name of a model's renderer.

    Raises:
        ConfigError: the chat template of the model is unknown.
    """
    renderer = find_renderer_name(model, tokenizer)
    if renderer is None:
        raise ConfigError(
            f"The chat format of {model} is unknown: set renderer_name to a renderer of tinker-cookbook, such as "
            "role_colon for a model without a chat format."
        )
    return renderer

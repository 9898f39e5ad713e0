"""The chat format of a model: the one that is named, or the one that the model was made with."""

from __future__ import annotations

from contextlib import suppress

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import get_recommended_renderer_names
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError

CHATML = "qwen3_instruct"


def recommended_renderers(model: str) -> list[str]:
    """tinker-cookbook's renderers of a model, the best one first; none of a model that it does not know."""
    with suppress(ConfigurationError, KeyError, ValueError):
        return get_recommended_renderer_names(model)
    return []


def renderer_of(model: str, tokenizer: Tokenizer) -> str:
    """The name of the renderer for a model: tinker-cookbook's, or that of ChatML where its template is that.

    Raises:
        ConfigError: nobody knows it.
    """
    if known := recommended_renderers(model):
        return known[0]
    if "<|im_start|>" in str(getattr(tokenizer, "chat_template", "")):
        return CHATML
    raise ConfigError(
        f"Nobody says how conversations are written for {model}: set renderer_name to a renderer of tinker-cookbook, "
        "as role_colon for a model without a chat format."
    )

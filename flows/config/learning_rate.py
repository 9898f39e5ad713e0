"""Recommended LoRA learning rate of a model, by tinker-cookbook's published rule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.hyperparam_utils import get_lr

from blocks.errors import ConfigError, reason

# Model family and hidden size of the local engine's named models.
_BUILT_IN = {
    "tiny": ("llama", 32),
    "smollm2-135m": ("llama", 576),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", 576),
}
# Two models per family with their hidden sizes: the power law interpolates between them.
_KNOWN: Mapping[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "llama": (("meta-llama/Llama-3.2-1B", 2048), ("meta-llama/Llama-3.1-8B", 4096)),
    "qwen": (("Qwen/Qwen3-30B-A3B", 2048), ("Qwen/Qwen3-8B", 4096)),
}


def recommended_rate(model: str) -> float:
    """Return ``5e-4 * (2000 / hidden size) ** k``, where ``k`` is 0.781 for Llama and 0.0775 for Qwen.

    The local engine's `tiny` and `smollm2-135m` are Llama models. A model directory declares its architecture and
    hidden size in its config.json.

    Raises:
        ConfigError: The rule does not cover the model's family.

    >>> round(recommended_rate("Qwen/Qwen3-8B"), 6), round(recommended_rate("smollm2-135m"), 6)
    (0.000473, 0.001322)
    """
    family, hidden_size = _BUILT_IN.get(model) or _read(model) or ("", 0)
    try:
        return _by_size(family, hidden_size) if hidden_size else get_lr(model)
    except (TinkerCookbookError, NotImplementedError, KeyError, ValueError, OSError) as error:
        raise ConfigError(
            f"learning_rate is auto, but the rule does not cover the model {model} ({reason(error)}): set a number, "
            "such as 1e-4, and tune it with a sweep."
        ) from error


def is_local(model: str) -> bool:
    """Return whether the model is a named model of the local engine or a model directory."""
    return model in _BUILT_IN or _read(model) is not None


def _read(model: str) -> tuple[str, int] | None:
    """Return the family and hidden size in a model directory's config.json; None without a readable config.json.

    A family outside of `_KNOWN` keeps the name in the file. The hidden size is 0 if the file has none.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size = config.get("hidden_size") or config.get("text_config", {}).get("hidden_size", 0)
    kind = str(config.get("model_type", ""))
    return next((family for family in _KNOWN if kind.startswith(family)), kind), int(size)


def _by_size(family: str, hidden_size: int) -> float:
    """Apply the power law of a model family.

    Raises:
        ValueError: The family is unknown.
    """
    if family not in _KNOWN:
        raise ValueError(f"the rule covers {' and '.join(_KNOWN)}, and the family is {family or 'unknown'}")
    (small, small_size), (large, large_size) = _KNOWN[family]
    exponent = math.log(get_lr(large) / get_lr(small)) / math.log(large_size / small_size)
    return get_lr(small) * (hidden_size / small_size) ** exponent

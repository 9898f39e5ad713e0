"""The learning rate of a model for LoRA, by tinker-cookbook's published rule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.hyperparam_utils import get_lr

from blocks.errors import ConfigError, reason

# What the local engine has under a name of its own: its architecture's family, and its hidden size.
_BUILT_IN = {
    "tiny": ("llama", 32),
    "smollm2-135m": ("llama", 576),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", 576),
}
# Two models of each family that the rule knows, with their hidden sizes: a power law goes through both.
_KNOWN: Mapping[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "llama": (("meta-llama/Llama-3.2-1B", 2048), ("meta-llama/Llama-3.1-8B", 4096)),
    "qwen": (("Qwen/Qwen3-30B-A3B", 2048), ("Qwen/Qwen3-8B", 4096)),
}


def recommended_rate(model: str) -> float:
    """``5e-4 * (2000 / hidden size) ** k``, where ``k`` is 0.781 for Llama and 0.0775 for Qwen.

    A model of the local engine goes by its architecture and hidden size: `tiny` and `smollm2-135m` are Llamas, and a
    directory says in its config.json what it is.

    Raises:
        ConfigError: there is no rule for the model's family.

    >>> round(recommended_rate("Qwen/Qwen3-8B"), 6), round(recommended_rate("smollm2-135m"), 6)
    (0.000473, 0.001322)
    """
    family, hidden_size = _BUILT_IN.get(model) or _read(model) or ("", 0)
    try:
        return _by_size(family, hidden_size) if hidden_size else get_lr(model)
    except (TinkerCookbookError, NotImplementedError, KeyError, ValueError, OSError) as error:
        raise ConfigError(
            f"There is no rule for the learning rate of {model} ({reason(error)}): give learning_rate a number, such "
            "as 1e-4, and try others around it by a sweep."
        ) from error


def is_local(model: str) -> bool:
    """Whether the local engine has it under a name of its own, or in a directory."""
    return model in _BUILT_IN or _read(model) is not None


def _read(model: str) -> tuple[str, int] | None:
    """Family and hidden size by a model directory; None where there is none."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size = config.get("hidden_size") or config.get("text_config", {}).get("hidden_size", 0)
    kind = str(config.get("model_type", ""))
    return next((family for family in _KNOWN if kind.startswith(family)), kind), int(size)


def _by_size(family: str, hidden_size: int) -> float:
    """The rule for a model that it has no name for, by its family's power law.

    Raises:
        ValueError: it has none.
    """
    if family not in _KNOWN:
        raise ValueError(f"the rule is for {' and '.join(_KNOWN)}, and this is {family or 'none of them'}")
    (small, small_size), (large, large_size) = _KNOWN[family]
    exponent = math.log(get_lr(large) / get_lr(small)) / math.log(large_size / small_size)
    return get_lr(small) * (hidden_size / small_size) ** exponent

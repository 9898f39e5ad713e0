"""Internals of transformers that the project changes. Only this module changes them."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any
from unittest.mock import patch

import transformers.models.auto.configuration_auto  # noqa: F401  (before the patch, which its modules would keep)
from transformers import utils

_IMPORTING = Lock()


def import_auto_tokenizer() -> None:
    """Import `AutoTokenizer` without `transformers.generation`, which takes most of a second.

    It imports the compiler of torch and, where they are installed, scikit-learn and accelerate. `AutoTokenizer` imports
    `auto_factory`, which needs it only to complete a model whose code comes with its weights; it is imported then.
    """
    with _IMPORTING:  # two threads would leave each other's patch behind
        _import_once()


@cache
def _import_once() -> None:
    with patch.object(utils, "is_torch_available", lambda: False):
        from transformers.models.auto import auto_factory

    module: Any = auto_factory
    if hasattr(module, "GenerationMixin"):  # somebody else has imported the module already
        return
    complete = module.add_generation_mixin_to_remote_model

    def import_and_complete(model_class: type) -> type:
        from transformers import GenerationMixin

        module.GenerationMixin = GenerationMixin
        return complete(model_class)

    module.add_generation_mixin_to_remote_model = import_and_complete
    from transformers import AutoTokenizer  # noqa: F401

"""Internals of chz that the project uses. Only this module imports them."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import chz.factories as factories
from chz.factories import MetaFromString, _module_from_name, _module_getattr
from chz.tiepin import eval_in_context

from objectives.config.import_policy import NotAllowedError, check_builder, check_module, is_restricted


@cache
def guard_imports() -> None:
    """Apply the import policy to the strings that chz turns into classes, functions and lambdas."""
    factories._module_from_name = _checked_module
    factories._module_getattr = _checked_attribute
    factories.eval_in_context = _checked_eval  # pyright: ignore[reportPrivateImportUsage]


def _checked_module(name: str) -> ModuleType:
    try:
        check_module(name, name)
    except NotAllowedError as error:
        raise MetaFromString(str(error)) from error
    return _module_from_name(name)


def _checked_attribute(module: ModuleType, name: str) -> Any:
    value = _module_getattr(module, name)
    path = f"{module.__name__}:{name}"
    try:
        if isinstance(value, type):
            check_module(value.__module__, path)
        else:
            check_builder(value, path, ())
    except NotAllowedError as error:
        raise MetaFromString(str(error)) from error
    return value


def _checked_eval(code: str, context: object) -> Any:
    if is_restricted():
        raise MetaFromString(f"{code!r} is code, which the config of a deployment's run may not contain: name a class")
    return eval_in_context(code, context)

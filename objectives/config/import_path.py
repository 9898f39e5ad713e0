"""Import of objects by path, ``package.module:name``, and functions that configs name by their paths."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from objectives.config.aliases import current_path
from objectives.config.import_policy import NotAllowedError, check_function, check_module, check_object
from objectives.errors import ObjectiveError, exit_call


def import_path(path: str) -> object:
    """Return the object at ``package.module:name`` or ``package.module.name``.

    A path of an earlier release leads to the object under its present name.

    Raises:
        NotAllowedError: the config of a deployment may not import from the module.
        ImportError: the path has no module, the module does not exist or calls ``sys.exit``, or it has no such name.
        Exception: whatever the module raises while it is imported.

    >>> import_path("math:sqrt")(9.0)
    3.0
    """
    module_name, _, name = current_path(path).partition(":")  # current_path returns the form with a colon
    if not module_name or not name:
        raise ImportError(f"{path!r} is not an import path: write package.module:name.")
    check_module(module_name, path)
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise ImportError(f"module {module_name!r} calls {exit_call(error)} while it is imported") from error
    try:
        value = getattr(module, name)
    except AttributeError:
        raise ImportError(f"module {module_name!r} has no attribute {name!r}") from None
    check_object(value, path)
    return value


@dataclass(frozen=True, slots=True)
class ImportedFunction:
    """Function of the user, named by its import path in the parameters of a term.

    Building the objective imports and checks it.

    Attributes:
        path: ``package.module:name``.

    >>> ImportedFunction("math:sqrt")(9.0)
    3.0
    """

    path: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.path):
            raise ValueError(f"{self.path!r} is not an import path; write package.module:name")

    def __str__(self) -> str:
        return self.path

    def __call__(self, *args: object) -> Any:
        return self.load()(*args)

    def load(self) -> Callable[..., object]:
        """Import the function.

        Raises:
            NotAllowedError: the config of a deployment may not import or call the function.
            ObjectiveError: the path cannot be imported, or leads to an object that is not callable.
        """
        try:
            function = import_path(self.path)
            check_function(function, self.path)
        except NotAllowedError:
            raise
        except Exception as error:  # importing a user's module can raise anything
            raise ObjectiveError(
                f"the function {self.path!r} could not be imported ({type(error).__name__}: {error}); correct it, "
                "or install its module where the run starts"
            ) from error
        if not callable(function):
            raise ObjectiveError(f"{self.path!r} is of type {type(function).__name__}; name a function")
        return function

    def fingerprint(self) -> str:
        """Return the path and a hash of the source of its module, which changes if the code does."""
        try:
            source = inspect.getsource(importlib.import_module(current_path(self.path).partition(":")[0]))
        except (OSError, TypeError):  # the module has no source file
            source = ""
        return f"{self.path} {hashlib.sha256(source.encode()).hexdigest()}"

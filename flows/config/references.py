"""Quick check of the files and the code that a config names, before servers start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from blocks.files.local import missing_file_error, path_of
from flows.config.base import BuilderConfig
from objectives.config.aliases import current_path
from objectives.config.spec import ObjectiveSpec

# Parameters that name a file to read, and the packages whose builders have these parameters.
_FILE_PARAMS = ("file_path", "train_path", "test_path")
_PACKAGES = ("tinker_cookbook", "tasks", "examples", "tinker_flows")


def check_references(config: BaseModel) -> None:
    """Check that the builders and terms that a config names exist, and the data files of builders.

    A builder is looked up in the text of its module, because importing it may take seconds. If the text does not
    contain its name, the module is imported, and the import decides.

    Raises:
        ConfigError: A file or builder does not exist.
        ObjectiveError: A term does not exist, or rejects its parameters.
    """
    for field, value in _parts(config, ""):
        if isinstance(value, BuilderConfig):
            _check_builder(field, value)
        elif isinstance(value, ObjectiveSpec):
            from objectives.objective import Objective  # imports the terms with their libraries

            with Objective.from_spec(value):
                pass


def _parts(value: object, field: str) -> Iterator[tuple[str, object]]:
    """Yield the models in a config with the dotted paths of their fields."""
    if isinstance(value, BaseModel):
        yield field, value
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name), f"{field}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _parts(item, f"{field}.{index}")


def _check_builder(field: str, config: BuilderConfig) -> None:
    module, _, name = current_path(config.builder).partition(":")
    if not _is_named_in(module, name):
        from tasks.common.builders import import_object  # imports tinker-cookbook, for seconds

        import_object(config.builder, f"{field}.builder")
    if module.partition(".")[0] not in _PACKAGES:
        return
    for name, file in _files(config.params, f"{field}.params"):
        path = path_of(file)
        if "://" not in file and not (path and path.exists()):  # tinker-cookbook also reads from object stores
            raise missing_file_error(file, name)


def _files(params: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of parameters that name files, with the files; also of nested ones and below dotted keys."""
    if isinstance(params, dict):
        for key, value in params.items():  # pyright: ignore[reportUnknownVariableType]
            if str(key).rpartition(".")[2] in _FILE_PARAMS and isinstance(value, str) and value:  # pyright: ignore[reportUnknownArgumentType]
                yield f"{path}.{key}", value
            else:
                yield from _files(value, f"{path}.{key}")
    elif isinstance(params, list):
        for index, item in enumerate(params):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _files(item, f"{path}.{index}")


def _is_named_in(module: str, name: str) -> bool:
    """Return whether the source of a module has a name; also False if the source is not found."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return False
    if spec is None:
        return False
    files, folders = [Path(spec.origin or "")], [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in rest:
        files = [file for folder in folders for file in (folder / part / "__init__.py", folder / f"{part}.py")]
        folders = [folder / part for folder in folders]
    sources = [file for file in files if file.suffix == ".py" and file.is_file()]
    return any(re.search(rf"\b{re.escape(name)}\b", file.read_text(errors="replace")) for file in sources)

"""Digests of the content that a run depends on: files, tokenizers, batches and the user's code."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from tinker_cookbook.tokenizer_utils import Tokenizer

from objectives.batch import Batch
from objectives.term import definition_of

# Digests of the content of a run by kind, such as `data`, and by name, such as a path.
Digests = dict[str, dict[str, str]]

_LENGTH = 16
_PROJECT = Path(__file__).parents[2]
_OWN_PACKAGES = frozenset({"blocks", "deployments", "engine", "flows", "objectives", "tasks", "tinker_flows"})


def changed_contents(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> dict[str, list[str]]:
    """Return the names whose digests differ, by kind.

    A name on one side only is ignored, because it comes from a changed config.
    """
    changed: dict[str, list[str]] = {}
    for kind, digests in now.items():
        names = [name for name, digest in digests.items() if before.get(kind, {}).get(name, digest) != digest]
        if names:
            changed[kind] = sorted(names)
    return changed


def digest_text(text: str) -> str:
    """Digest a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def digest_file(path: Path) -> str:
    """Digest the content of a file. Its size and time would not do, because they may survive a change of content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_LENGTH]


def digest_folder(path: Path) -> str:
    """Digest the names and contents of all files below a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest_text("\n".join(f"{file.relative_to(path)} {digest_file(file)}" for file in files))


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """Digest the vocabulary, rules and chat template of a tokenizer; leave out settings that encoding changes."""
    rules: dict[str, Any] = {"vocabulary": sorted(tokenizer.get_vocab().items())}
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        fields = json.loads(backend.to_str())
        rules |= {key: fields.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    return digest_text(json.dumps([rules, str(getattr(tokenizer, "chat_template", None))], sort_keys=True))


def digest_batch(batch: Batch) -> str:
    """Digest the targets, weights and bounds of the datums of a batch."""
    digest = hashlib.sha256()
    for tensor in (batch.target_tokens_DT, batch.weights_DT, batch.offsets_D):
        digest.update(f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:_LENGTH]


def digest_code(function: Callable[..., object]) -> str | None:
    """Digest the code of a function or class of the user: its module and the modules of the user that it imports.

    Returns:
        Digest; name and version of the package if the code is installed; None for the code of tinker-flows and for code
        without a source, such as a builtin function.
    """
    definition = definition_of(function)
    module = inspect.getmodule(definition)
    file = _file_of(module)
    if module is None or file is None:
        try:
            return digest_text(inspect.getsource(definition))
        except (OSError, TypeError):
            return None
    # Before the check for installed code, because tinker-flows itself may be installed.
    if _is_own(module.__name__, file):
        return None
    if _is_installed(module.__name__, file):
        return _installed_version(module)
    files = _imported_files(module.__name__, file)
    return digest_text("\n".join(f"{name} {digest_file(path)}" for name, path in sorted(files.items())))


def _imported_files(name: str, file: Path) -> dict[str, Path]:
    """Return the files of a module and of all modules of the user that it imports, directly or not, by name.

    Imports inside functions count, whether or not they have run: the result must not depend on when it is computed.
    """
    files: dict[str, Path] = {}
    pending = [(name, file)]
    while pending:
        name, file = pending.pop()
        if name in files or _is_installed(name, file) or _is_own(name, file):
            continue
        files[name] = file
        for imported in _names_in_statements(name, file):
            pending += _find_files(imported)
    return files


def _find_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield name and file of a module and of each package that contains it, without importing them.

    ``from a import b`` has the name ``a.b``, which may be a function; only the file of ``a`` then exists.
    """
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # __main__ and modules made by code have no spec
        return
    if spec is None:
        return
    if spec.origin and spec.origin.endswith(".py"):
        yield top, Path(spec.origin)
    # Not by find_spec, which imports the packages of a module.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for end, part in enumerate(rest, 2):
        places = [folder / part for folder in folders]
        files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
        file = next(filter(Path.is_file, files), None)
        if file:
            yield ".".join(name.split(".")[:end]), file
        folders = [file.parent] if file and file.name == "__init__.py" else places


def _names_in_statements(name: str, file: Path) -> Iterator[str]:
    """Yield the full names of the modules that the import statements of a module may mean."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # such a module cannot be imported, so it imports nothing
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # beyond the top package
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name) if name and name.endswith(".py") and Path(name).is_file() else None


def _is_installed(name: str, file: Path) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or bool({"site-packages", "dist-packages"} & set(file.parts))


def _is_own(name: str, file: Path) -> bool:
    return file.is_relative_to(_PROJECT) and name.partition(".")[0] in _OWN_PACKAGES


def _installed_version(module: ModuleType) -> str:
    top = module.__name__.partition(".")[0]
    try:
        return f"{top} {version(top)}"
    except PackageNotFoundError:  # the distribution has another name; to find it takes half a second
        names = sorted(set(_distributions().get(top, [])))
        return " ".join(f"{name} {version(name)}" for name in names) or top


@cache
def _distributions() -> dict[str, list[str]]:
    """Return the distributions by top-level package."""
    return dict(packages_distributions())

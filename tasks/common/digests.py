"""Digests of what a run depends on: files, tokenizers, batches, and code of the user."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from tinker_cookbook.tokenizer_utils import Tokenizer

from objectives.batch import Batch
from objectives.term import definition_of

_LENGTH = 16
_PROJECT = Path(__file__).parents[2]
_OWN_PACKAGES = frozenset({"blocks", "deployments", "engine", "flows", "objectives", "tasks", "tinker_flows"})


def digest_text(text: str) -> str:
    """Digest a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def digest_file(path: Path) -> str:
    """Digest the content of a file, not its size and time, which may stay the same when the content changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_LENGTH]


def digest_folder(path: Path) -> str:
    """Digest the names and contents of all files below a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest_text("\n".join(f"{file.relative_to(path)} {digest_file(file)}" for file in files))


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """Digest the vocabulary, the rules and the chat template of a tokenizer, but no setting that its use changes."""
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
        Digest; name and version of the package if the code is installed; None for the code of this project.
    """
    definition = definition_of(function)
    module = inspect.getmodule(definition)
    file = _file_of(module)
    if module is None or file is None:
        try:
            return digest_text(inspect.getsource(definition))
        except (OSError, TypeError):
            return None
    # First, because this project may be installed as well.
    if _is_own(module, file):
        return None
    if _is_installed(module, file):
        return _installed_version(module)
    modules = _imported_modules(module)
    return digest_text("\n".join(f"{name} {digest_file(path)}" for name, path in sorted(modules.items())))


def _imported_modules(module: ModuleType) -> dict[str, Path]:
    """Return the files of a module and of all modules of the user that it imports, directly or not, by name."""
    modules: dict[str, Path] = {}
    pending = [module]
    while pending:
        current = pending.pop()
        file = _file_of(current)
        if file is None or current.__name__ in modules or _is_installed(current, file) or _is_own(current, file):
            continue
        modules[current.__name__] = file
        pending += [sys.modules[name] for name in _imported_names(current, file) if name in sys.modules]
    return modules


def _imported_names(module: ModuleType, file: Path) -> Iterator[str]:
    """Yield the names of the modules that a module may import, with their packages.

    ``from a import b`` yields ``a.b``, which may be a function.
    """
    for name in _names_in_statements(module, file):
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _names_in_statements(module: ModuleType, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = resolve_name(name, module.__package__) if node.level and module.__package__ else name
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name) if name and name.endswith(".py") and Path(name).is_file() else None


def _is_installed(module: ModuleType, file: Path) -> bool:
    top = module.__name__.partition(".")[0]
    return top in sys.stdlib_module_names or bool({"site-packages", "dist-packages"} & set(file.parts))


def _is_own(module: ModuleType, file: Path) -> bool:
    return file.is_relative_to(_PROJECT) and module.__name__.partition(".")[0] in _OWN_PACKAGES


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

"""Tokenizer and configuration files of a served model, as clients download them from a Hugging Face hub."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.models import ALIASES, LoadedModel

SUFFIXES = (".json", ".jinja", ".txt", ".model")
MAX_BYTES = 64 * 2**20
_IGNORED_SUFFIXES = (".safetensors.index.json",)


@dataclass(frozen=True, slots=True)
class HubModel:
    """The files of one model as a hub repository with one commit.

    Attributes:
        paths: path of each file, by file name.
        etags: SHA-256 of each file, by file name.
        commit: 40 hexadecimal digits that change when a file changes.
    """

    paths: Mapping[str, Path]
    etags: Mapping[str, str]
    commit: str


def hub_model(loaded: LoadedModel) -> HubModel:
    """Collect the tokenizer and configuration files in the model's directory, without weights and code."""
    paths = {
        path.name: path
        for path in sorted(loaded.path.iterdir())
        if path.is_file()
        and path.name.endswith(SUFFIXES)
        and not path.name.endswith(_IGNORED_SUFFIXES)
        and path.stat().st_size <= MAX_BYTES
    }
    etags = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    commit = hashlib.sha1(repr(sorted(etags.items())).encode(), usedforsecurity=False).hexdigest()
    return HubModel(paths, etags, commit)


def hub_names(loaded: LoadedModel) -> tuple[str, ...]:
    """List the names of the model on the hub: its requested name, its known aliases and its directory's name."""
    aliases = [alias for alias, name in ALIASES.items() if name == loaded.name]
    return tuple(dict.fromkeys((loaded.name, *aliases, loaded.path.name)))

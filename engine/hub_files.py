"""What of a served model a client may download to make its tokenizer, and under which names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.models import ALIASES, LoadedModel

SUFFIXES = (".json", ".jinja", ".txt", ".model")
MAX_BYTES = 64 * 2**20
_NOT_OFFERED = (".safetensors.index.json",)


@dataclass(frozen=True, slots=True)
class HubModel:
    """The files of one model as a hub repository with one commit.

    Attributes:
        paths: by file name.
        etags: SHA-256 of each file.
        commit: 40 hexadecimal digits that change when a file does.
    """

    paths: Mapping[str, Path]
    etags: Mapping[str, str]
    commit: str


def hub_model(loaded: LoadedModel) -> HubModel:
    """The tokenizer and configuration files in the model's directory; no weights, and nothing that runs."""
    paths = {
        path.name: path
        for path in sorted(loaded.path.iterdir())
        if path.is_file()
        and path.name.endswith(SUFFIXES)
        and not path.name.endswith(_NOT_OFFERED)
        and path.stat().st_size <= MAX_BYTES
    }
    etags = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    commit = hashlib.sha1(repr(sorted(etags.items())).encode(), usedforsecurity=False).hexdigest()
    return HubModel(paths, etags, commit)


def hub_names(loaded: LoadedModel) -> tuple[str, ...]:
    """Names the model goes by: the one it was asked for, its known alias, and its directory's."""
    aliases = [alias for alias, name in ALIASES.items() if name == loaded.name]
    return tuple(dict.fromkeys((loaded.name, *aliases, loaded.path.name)))

"""Content that a run depends on: recorded as digests with each checkpoint, and compared when the run resumes.

The config names data, code and models; its fields are compared by `config_record`. The digests notice that what these
names stand for has changed. In a folder of data, each file of a known format has its own digest. Files that are new or
missing are not compared, because a builder may also write to the folder; only the last batch can reveal them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from blocks.files.local import path_of
from flows.config.base import RunConfig
from flows.config.loader import renderer_names
from flows.monitoring.run_tags import emit_accepted_change, note_warning
from flows.runs.run import Run
from flows.runs.start.config_record import MAY_CHANGE
from objectives.batch import Batch
from objectives.config.aliases import current_path
from objectives.config.import_path import ImportedFunction
from objectives.objective import Objective
from objectives.term import Term
from tasks.common.digests import (
    Digests,
    changed_contents,
    digest_batch,
    digest_code,
    digest_file,
    digest_folder,
    digest_text,
    digest_tokenizer,
)
from tasks.training.checkpoints import CONTENTS_KEY, step_of

# Format of the digests. 1, or missing: imports inside functions counted only once they had run.
_FORMAT = 2
_PACKAGES = ("tinker-flows", "tinker", "torch", "tinker-cookbook")
# Kinds of content by the config field that names it; other fields name data.
_KINDS = {
    "objective": "terms",
    "evaluators": "evaluators",
    "infrequent_evaluators": "evaluators",
    "environment": "environment",
    "rollout": "environment",
    "advantage": "environment",
}

# Formats of the data files of a folder; subfolders are not searched.
_DATA_SUFFIXES = frozenset({".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv", ".txt"})


@runtime_checkable
class RepeatableSource(Protocol):
    """Source whose batches depend only on the data, the seed and the step."""

    def batch_at(self, step: int) -> Batch: ...


@dataclass(slots=True)
class Contents:
    """Digests of the content of a run.

    Attributes:
        digests: digests by kind, such as `data`, and by name, such as a path.
        datums: digest of all batches trained on so far, in their order; empty before the first.
        last_batch: step and digest of the last batch; None for sampled batches, or if the step had several batches.
    """

    digests: Digests
    datums: str = ""
    last_batch: tuple[int, str] | None = None

    def add(self, step: int, batches: Sequence[Batch], *, sampled: bool) -> None:
        """Add the batches of a step."""
        digest = _digest_step(batches)
        self.datums = digest_text(f"{self.datums} {digest}")
        self.last_batch = None if sampled or len(batches) != 1 else (step, digest)

    def state(self) -> dict[str, Any]:
        """Return the contents as part of a checkpoint's record."""
        versions = {name: version(name) for name in _PACKAGES}
        own = {"format": _FORMAT, "digests": self.digests, "datums": self.datums, "last_batch": self.last_batch}
        return {**own, "versions": versions}


def _digest_step(batches: Sequence[Batch]) -> str:
    return digest_text(" ".join(map(digest_batch, batches)))


def open_contents(
    run: Run, config: RunConfig, objective: Objective, source: object, start: CheckpointRecord | None
) -> Contents:
    """Digest the content of a run, and compare it with that of the checkpoint that the run resumes from.

    Raises:
        ConfigError: Content that `accept_changes` does not name has changed.
    """
    contents = Contents(digest_contents(config, objective, run.client.get_tokenizer()))
    if start is None or start.has("parent"):  # the run has no checkpoint of its own yet
        return contents
    recorded: Mapping[str, Any] | None = start.get(CONTENTS_KEY, None)
    step = step_of(start)
    if recorded is None:
        note_warning(
            run.log,
            "contents",
            f"The checkpoint of {config.run_name} at step {step} has no digests of its data and code: changes before "
            "this start cannot be noticed; later ones are.",
        )
        return contents
    contents.datums = str(recorded.get("datums", ""))
    if last := recorded.get("last_batch"):
        contents.last_batch = (int(last[0]), str(last[1]))
    before: Digests = recorded.get("digests", {})
    if recorded.get("format", 1) != _FORMAT:
        before = _without_code(before)
        note_warning(
            run.log,
            "contents",
            f"The checkpoint of {config.run_name} at step {step} has digests of code in another format: changes of "
            "code before this start cannot be noticed; later ones are.",
        )
    changed = changed_contents(before, contents.digests)
    if contents.last_batch and isinstance(source, RepeatableSource):
        last_step, digest = contents.last_batch
        if _digest_step([source.batch_at(last_step)]) != digest:
            cause = (
                "" if "data" in changed else "; no file has changed, so its source may draw at random without a seed"
            )
            changed.setdefault("data", []).append(f"the batch of step {last_step}{cause}")
    _check(run, config, step, changed)
    versions: Mapping[str, str] = recorded.get("versions", {})
    if changes := [
        f"{name} {version(name)} instead of {versions[name]}"
        for name in sorted(_PACKAGES)
        if versions.get(name, version(name)) != version(name)
    ]:
        text = f"{config.run_name} resumes at step {step} with other versions: {', '.join(changes)}."
        note_warning(run.log, "versions", text)
    return contents


def digest_contents(config: RunConfig, objective: Objective, tokenizer: Tokenizer) -> Digests:
    """Digest the files, the code of the user, the model and the tokenizer that a config names.

    Raises:
        ConfigError: A file of a model folder cannot be read.
    """
    digests: Digests = {}
    model = path_of(config.model)
    folders = {config.model} if model and model.is_dir() else set[str]()
    # Fields that may change are not digested, except evaluators.
    ignored = (MAY_CHANGE | {"model", "engine"}) - _KINDS.keys()
    for field, value in config.model_dump(mode="json").items():
        if field in ignored:
            continue
        kind = _KINDS.get(field, "data")
        for text, may_be_folder in texts_in(value):
            if _is_model_folder(text):
                folders.add(text)
            elif digest := _digest_of_name(text):
                digests.setdefault(kind, {})[text] = digest
            elif may_be_folder and (files := _data_files(text)):
                digests.setdefault(kind, {}).update({str(file): digest_file(file) for file in files})
    terms = [*objective.regularizers, *([objective.base] if objective.base else [])]
    for term in terms:
        functions = [function for function in (term.term.evaluate, term.term.prepare) if function]
        parts = [digest_code(function) for function in functions]
        parts += [digest_code(value.load()) for value in _functions_in(term.params)]
        code = " ".join(filter(None, parts))
        if code:
            digests.setdefault("terms", {})[term.name] = code
    if folders:
        digests["model"] = {folder: _digest_model(folder) for folder in sorted(folders)}
    digests["tokenizer"] = {"tokenizer": digest_tokenizer(tokenizer), **_renderers(config, tokenizer)}
    return digests


def _digest_model(folder: str) -> str:
    try:
        return digest_folder(Path(folder).expanduser())
    except OSError as error:
        raise ConfigError(f"Cannot read the model folder {folder} ({error}): make all its files readable.") from None


def _without_code(digests: Digests) -> Digests:
    """Return the digests of files, models and tokenizers."""
    return {
        kind: {
            name: digest
            for name, digest in names.items()
            if kind in ("model", "tokenizer") or ((path := path_of(name)) and path.is_file())
        }
        for kind, names in digests.items()
    }


def _check(run: Run, config: RunConfig, step: int, changed: Mapping[str, Sequence[str]]) -> None:
    """Refuse changes that are not accepted; report accepted ones as a tag, an event and a line of the report."""
    descriptions = {kind: f"{kind} ({', '.join(names)})" for kind, names in changed.items()}
    if refused := [kind for kind in changed if kind not in config.accept_changes]:
        described = ", ".join(descriptions[kind] for kind in refused)
        raise ConfigError(
            f"The content of {described} has changed since the checkpoint of {config.run_name!r} at step {step}: "
            f"restore it, choose another run_name, or set accept_changes to [{', '.join(sorted(changed))}] to continue "
            "with it."
        )
    for kind, description in descriptions.items():
        text = f"The content of {description} has changed at step {step}, as accept_changes allows."
        note_warning(run.log, f"accepted.{kind}", text)
        emit_accepted_change(run.log, config.run_name, {"step": step, "kind": kind, "names": list(changed[kind])})


def _is_model_folder(text: str) -> bool:
    """Return whether a text names a model directory, such as that of a teacher, a reference or a judge."""
    with suppress(OSError):
        path = path_of(text)
        return bool(path and (path / "config.json").is_file() and any(path.glob("*.safetensors")))
    return False


def _data_files(text: str) -> list[Path]:
    """Return the files with data in the folder that a text names; empty if it names none."""
    with suppress(OSError):
        path = path_of(text)
        if path and path.is_dir():
            return sorted(file for file in path.iterdir() if file.suffix in _DATA_SUFFIXES and file.is_file())
    return []


def texts_in(value: Any, may_be_folder: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield all strings of a config value, each with whether it may name a folder of data.

    Only a string below `params` or `path` may name a folder. Any other, such as the name of a term, may equal the name
    of a folder by chance.
    """
    if isinstance(value, str):
        yield value, may_be_folder
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(item, may_be_folder or key in ("params", "path"))
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts_in(item, may_be_folder)


def _functions_in(params: Mapping[str, object]) -> Iterator[ImportedFunction]:
    for value in params.values():
        if isinstance(value, ImportedFunction):
            yield value


def _digest_of_name(text: str) -> str | None:
    """Return the digest of the file or the user's code that a string names; None for other strings."""
    with suppress(OSError):
        if (path := path_of(text)) and path.is_file():
            return digest_file(path)
    module, _, name = current_path(text).partition(":")
    # Only imported modules are looked up: the run has imported all that it uses, and others may be forbidden.
    target = getattr(sys.modules.get(module), name, None) if name else None
    # Terms are digested by their names, with both of their functions.
    return digest_code(target) if callable(target) and not isinstance(target, Term) else None


def _renderers(config: RunConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Digest the prompt that each renderer of a config makes of a conversation."""
    turns = (("user", "1 + 1?"), ("assistant", "2"), ("user", "+ 1?"))
    conversation = [Message(role=role, content=content) for role, content in turns]
    digests: dict[str, str] = {}
    for name in renderer_names(config):
        with suppress(Exception):  # a renderer that fails here is reported where it is used
            prompt = get_renderer(name, tokenizer).build_generation_prompt(conversation)
            digests[f"renderer {name}"] = digest_text(str(prompt.to_ints()))
    return digests

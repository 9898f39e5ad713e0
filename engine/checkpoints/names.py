"""Names of training runs and checkpoints, as the Tinker protocol defines them and as folder names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import NotFoundError, RequestError

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """The three parts of ``tinker://<run>/<kind>/<name>``, which are also names of folders.

    The class does not check them. `parse_path` checks the parts of a path, and `check_name` the name of a new
    checkpoint, so that no part leaves its folder.
    """

    run: str
    kind: Kind
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


def check_name(name: str | None) -> str:
    """Return ``name`` if it is a valid checkpoint name.

    Raises:
        RequestError: the name is invalid.
    """
    if not name or not _NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} is not a valid checkpoint name: use up to 128 letters, digits, '_', '-' and '.', "
            "and do not start with '-' or '.'."
        )
    return name


def parse_path(path: str) -> CheckpointName:
    """Parse a ``tinker://`` path.

    Raises:
        RequestError: the path is invalid.
    """
    parts = path.removeprefix("tinker://").split("/")
    if path.startswith("tinker://") and len(parts) == 3:
        run, kind, name = parts
        for known in KINDS:
            if kind == known and _RUN.fullmatch(run) and _NAME.fullmatch(name):
                return CheckpointName(run, known, name)
    raise RequestError(
        f"{path!r} is not a checkpoint path: use a path returned by a save, tinker://<run>/<kind>/<name> "
        f"with one of the kinds {', '.join(KINDS)}."
    )


def is_run(run: str) -> bool:
    """Return True if ``run`` is a valid id of a training run."""
    return _RUN.fullmatch(run) is not None


def run_folder(run: str) -> str:
    """Return the folder name of a training run.

    Raises:
        NotFoundError: the run id is invalid, so no such run exists.
    """
    if not is_run(run):
        raise NotFoundError(f"There is no training run {run!r} in this engine's state folder: check the run id.")
    return run.replace(":", "_")

"""What a run computes once of each datum, in files of its directory, for its later epochs and parts."""

from __future__ import annotations

import logging

from blocks.storage import RunDirectory
from objectives.kept import CorruptKeptError, Kept
from tasks.options import step_task

FEATURES_NAME = "features.jsonl"

logger = logging.getLogger(__name__)


def load_kept(kept: Kept, directory: RunDirectory, name: str = FEATURES_NAME) -> None:
    """Take in what the run kept; what a crash or a disk broke is dropped, and computed again."""
    content = directory.read_bytes(name) or b""
    try:
        num_whole = kept.load(content)
    except CorruptKeptError as error:
        where = f"{directory.location}/{name}"
        logger.warning("What was kept in %s is dropped and computed again, because %s.", where, error)
        num_whole = 0
    if num_whole < len(content):
        directory.write_bytes(name, content[:num_whole])


@step_task(name="features")
def save_kept(kept: Kept, directory: RunDirectory, name: str = FEATURES_NAME) -> None:
    """Keep what was computed since the last time."""
    line = kept.take_unsaved()
    if line is not None:
        directory.append_line(name, line)

"""Caches of a run: features and generated text, in files of its directory, for later epochs and resumed runs."""

from __future__ import annotations

import logging

from blocks.storage import RunDirectory
from objectives.jsonl_cache import CorruptCacheError, JsonlCache
from tasks.common.task import step_task

FEATURES_NAME = "features.jsonl"

logger = logging.getLogger(__name__)


def load_cache(cache: JsonlCache, directory: RunDirectory, name: str = FEATURES_NAME) -> None:
    """Load a cache from its file; drop a corrupt file with a warning and truncate a torn tail."""
    content = directory.read_bytes(name) or b""
    try:
        num_valid = cache.load(content)
    except CorruptCacheError as error:
        path = f"{directory.location}/{name}"
        logger.warning("The cache %s is dropped and computed again, because %s.", path, error)
        num_valid = 0
    if num_valid < len(content):
        directory.write_bytes(name, content[:num_valid])


@step_task(name="features")
def save_cache(cache: JsonlCache, directory: RunDirectory, name: str = FEATURES_NAME) -> None:
    """Append the unsaved entries of a cache to its file."""
    line = cache.pop_unsaved()
    if line is not None:
        directory.append_line(name, line)

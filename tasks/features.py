"""The prepared features of datums in the run's directory, for its later epochs and parts."""

from __future__ import annotations

import logging

from blocks.storage import RunDirectory
from objectives.feature_cache import CorruptFeaturesError, FeatureCache
from tasks.options import step_task

FEATURES_NAME = "features.jsonl"

logger = logging.getLogger(__name__)


def load_features(cache: FeatureCache, directory: RunDirectory) -> None:
    """Take in what the run kept; what a crash or a disk broke is dropped, and computed again."""
    content = directory.read_bytes(FEATURES_NAME) or b""
    try:
        num_whole = cache.load(content)
    except CorruptFeaturesError as error:
        where = f"{directory.location}/{FEATURES_NAME}"
        logger.warning("The kept features in %s are dropped and computed again, because %s.", where, error)
        num_whole = 0
    if num_whole < len(content):
        directory.write_bytes(FEATURES_NAME, content[:num_whole])


@step_task(name="features")
def save_features(cache: FeatureCache, directory: RunDirectory) -> None:
    """Keep what was prepared since the last time."""
    line = cache.take_unsaved()
    if line is not None:
        directory.append_line(FEATURES_NAME, line)

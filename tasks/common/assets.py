"""Prefect assets: results of tasks, with their metadata and the assets that they derive from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.assets import Asset, add_asset_metadata
from prefect.assets.core import MAX_ASSET_DESCRIPTION_LENGTH, AssetProperties
from prefect.cache_policies import NO_CACHE
from prefect.tasks import MaterializingTask

from tasks.common.digests import digest_text

P = ParamSpec("P")
R = TypeVar("R")

_MAX_KEY = 512  # Prefect's limit, in characters
_NOT_IN_KEYS = re.compile(r"""[\s\0#?&%"'<>\[\]{}|\\^`~]""")


def asset_key(location: str) -> str:
    """Return the asset key of a path or URI.

    A character that Prefect rejects becomes its code point between tildes. In a long key, a digest replaces the end.

    >>> asset_key("/data/my rows.jsonl"), asset_key("s3://bucket/runs/a")
    ('file:///data/my~20~rows.jsonl', 's3://bucket/runs/a')
    """
    uri = location if "://" in location else f"file://{Path(location).expanduser().absolute()}"
    key = _NOT_IN_KEYS.sub(lambda match: f"~{ord(match[0]):x}~", uri)
    return key if len(key) <= _MAX_KEY else f"{key[: _MAX_KEY - 17]}~{digest_text(key)[:16]}"


def describe_asset(key: str, description: str) -> Asset:
    """Return an asset that a task reads, with a description for its page."""
    return Asset(key=key, properties=AssetProperties(description=description[:MAX_ASSET_DESCRIPTION_LENGTH]))


def materialize(
    task: Task[P, R], key: str, upstream: Sequence[Asset], describe: Callable[[R], Mapping[str, Any]]
) -> Task[P, R]:
    """Return a task that also reports its result as a Prefect asset.

    Args:
        task: the task. It must have no hooks and no caching, because they are not copied to the returned task.
        key: key of the asset, see `asset_key`.
        upstream: assets that the result derives from.
        describe: function that returns the metadata of a result.
    """

    @wraps(task.fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result = task.fn(*args, **kwargs)
        add_asset_metadata(key, dict(describe(result)))
        return result

    return MaterializingTask(
        fn=run,
        assets=[Asset(key=key)],
        asset_deps=[*upstream],
        name=task.name,
        task_run_name=task.task_run_name,
        retries=task.retries,
        retry_delay_seconds=task.retry_delay_seconds,
        retry_jitter_factor=task.retry_jitter_factor,
        retry_condition_fn=task.retry_condition_fn,
        cache_policy=NO_CACHE,
        persist_result=False,
        log_prints=False,
    )

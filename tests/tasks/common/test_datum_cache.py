"""Caches in a run's directory, on disk and on S3."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server, running_s3

from blocks import RunStorage
from blocks.storage import RunDirectory
from objectives.feature_cache import FeatureCache
from tasks.common.datum_cache import FEATURES_NAME, load_cache, save_cache

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["disk", "s3"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """An empty run's directory of either kind."""
    if request.param == "disk":
        return RunStorage(url=str(tmp_path)).run_directory("run")
    server: S3Server = request.getfixturevalue("s3")
    storage = RunStorage(
        url=f"s3://{server.bucket}/features",
        endpoint_url=server.endpoint_url,
        access_key=SecretStr(ACCESS_KEY),
        secret_key=SecretStr(SECRET_KEY),
    )
    return storage.run_directory(tmp_path.name)


def cache_of(**features: object) -> FeatureCache:
    cache = FeatureCache()
    cache.put(dict(features))
    return cache


def warnings_of_features(caplog: pytest.LogCaptureFixture) -> list[str]:
    # Sessions of other tests, whose service has stopped, may log warnings at any time.
    return [record.getMessage() for record in caplog.records if record.name == "tasks.common.datum_cache"]


def test_saved_entries_are_loaded_and_an_unchanged_cache_writes_nothing(directory: RunDirectory) -> None:
    save_cache.fn(FeatureCache(), directory)
    assert directory.read_bytes(FEATURES_NAME) is None
    for cache in (cache_of(a=[1]), cache_of(b={"x": "\u2028"})):
        save_cache.fn(cache, directory)
        save_cache.fn(cache, directory)
    later = FeatureCache()
    load_cache(later, directory)
    assert later._values == {"a": [1], "b": {"x": "\u2028"}}
    assert (directory.read_bytes(FEATURES_NAME) or b"").count(b"\n") == 2


def test_torn_tail_is_truncated_before_the_next_entry(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    save_cache.fn(cache_of(a=1), directory)
    directory.write_bytes(FEATURES_NAME, (directory.read_bytes(FEATURES_NAME) or b"") + b'01234567 {"b":')
    load_cache(FeatureCache(), directory)
    save_cache.fn(cache_of(c=3), directory)
    later = FeatureCache()
    load_cache(later, directory)
    assert later._values == {"a": 1, "c": 3}
    assert warnings_of_features(caplog) == []


def test_corrupt_file_is_dropped_with_one_warning(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    for cache in (cache_of(a=1), cache_of(b=2), cache_of(c=3)):
        save_cache.fn(cache, directory)
    content = directory.read_bytes(FEATURES_NAME) or b""
    directory.write_bytes(FEATURES_NAME, content.replace(b'"b":2', b'"b":7'))
    later = FeatureCache()
    with caplog.at_level(logging.WARNING):
        load_cache(later, directory)
    assert later._values == {}
    (warning,) = warnings_of_features(caplog)
    assert "is dropped and computed again, because line 2 of 3 is broken" in warning
    load_cache(FeatureCache(), directory)
    assert len(warnings_of_features(caplog)) == 1

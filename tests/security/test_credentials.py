"""User names and passwords in URLs reach no record and no message."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tinker
from mlflow import MlflowClient
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.errors import ConfigError, CredentialsError, ServiceError
from blocks.prefect_errors import check_prefect_url, prefect_failures
from blocks.service import TinkerService
from blocks.storage import RunStorage
from blocks.tracking import MLflowTracking
from blocks.urls import has_credentials, hide_credentials
from flows.config.loader import validate_fields
from flows.config.train import SftConfig

SECRET = "s3cr@t"
FIELDS = {"run_name": "secret", "model": "tiny", "data": {"builder": "a:B"}}


@pytest.mark.parametrize(
    ("field", "url", "fix"),
    [
        ("base_url", f"http://me:{SECRET}@host:8000", "remove it and set TINKER_API_KEY"),
        ("tracking", f"https://me:{SECRET}@host", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("tracking", f"postgresql://me:{SECRET}@host/mlflow", "or MLFLOW_TRACKING_URI for a database"),
        ("tracking", f"postgresql://host/db?user=me&password={SECRET}", "or MLFLOW_TRACKING_URI for a database"),
        ("base_url", f"me:{SECRET}@host", "remove it and set TINKER_API_KEY"),
        ("storage", f"s3://key:{SECRET}@bucket/runs", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("data", {"builder": "a:B", "params": {"deep": [{"url": f"https://me:{SECRET}@host"}]}}, "the environment"),
        ("evaluators", [{"builder": "a:B", "params": {"base_url": f"http://me:{SECRET}@host"}}], "the environment"),
        ("mlflow_tags", {"origin": f"https://host/x?api_key={SECRET}"}, "the environment"),
        ("task_runner", {"kind": "dask", "address": f"tls://me:{SECRET}@host:1"}, "the environment"),
    ],
)
def test_a_config_with_credentials_is_refused(field: str, url: Any, fix: str) -> None:
    for make in (SftConfig.model_validate, lambda fields: SftConfig(**fields), lambda f: validate_fields(SftConfig, f)):
        with pytest.raises(
            CredentialsError, match="has a user name, a password or a secret, which would be recorded"
        ) as caught:
            make({**FIELDS, field: url})
        shown = "".join(traceback.format_exception(caught.value))
        assert f"'{field}" in str(caught.value)
        assert fix in str(caught.value)
        assert SECRET not in shown
        assert "s3cr" not in shown


def test_errors_of_other_fields_show_their_value() -> None:
    with pytest.raises(ValueError, match=r"num_steps\n.*input_value=-3"):
        SftConfig.model_validate({**FIELDS, "num_steps": -3})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:a#s3cret@host/db",
        "mysql+pymysql://me:a?s3cret@host/db",
        "http://me:s3/s3cret@host",
        "http://me:1s3cret/a@host",
        "me:s3cret@host",
        "postgresql://host/db?user=me&password=s3cret",
        "postgresql://host/db?PASSWORD=s3cret&sslpassword=s3cret#x",
        "https://host/data.jsonl?X-Amz-Signature=s3cret&X-Amz-Security-Token=s3cret",
        "https://host/?a=b&access_token=s3cret",
    ],
)
def test_credentials_are_found_and_hidden(url: str) -> None:
    assert has_credentials(url)
    assert "s3cret" not in hide_credentials(url)
    assert "***" in hide_credentials(url)
    assert hide_credentials(hide_credentials(url)) == hide_credentials(url)
    if "://" in url:
        shown = hide_credentials(f"could not open {url}: me@host")
        assert "s3cret" not in shown
        assert shown.endswith(" me@host")


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1]:8000/a@b",
        "http://host:5000/a@b",
        "http://host/?max_tokens=5&from=a@b",
        "https://kb.example/capital?of={country}&token={token}",
        "tinker://0a1b:train:0/weights/000010",
        "tinker_cookbook.supervised.data:FromConversationFileBuilder",
        "run@best",
        "a@b",
    ],
)
def test_other_urls_have_no_credentials(url: str) -> None:
    assert not has_credentials(url)
    assert hide_credentials(url) == url


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["a_", "://", "://a:", "?a_", "&token", "@", "://a@"])
def test_hostile_texts_take_no_long_time(part: str) -> None:
    text = "http://host/?" + part * (20_000 // len(part)) + "!"
    hide_credentials(text)
    has_credentials(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"url": f"s3://key:{SECRET}@bucket/runs"},
        {"url": "s3://bucket/runs", "endpoint_url": f"http://me:{SECRET}@127.0.0.1:9/"},
    ],
)
def test_a_storage_block_with_credentials_is_refused(fields: dict[str, str]) -> None:
    storage = RunStorage.model_validate(fields)
    for use in (lambda: storage.run_directory("x"), storage.run_names):
        with pytest.raises(ConfigError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
            use()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "use", "fix"),
    [
        ("TINKER_BASE_URL", lambda: TinkerService().get_client(), "remove it and set TINKER_API_KEY"),
        ("MLFLOW_TRACKING_URI", lambda: MLflowTracking().get_client(), "set MLFLOW_TRACKING_USERNAME"),
    ],
)
def test_an_environment_with_credentials_of_a_server_is_refused(
    variable: str,
    use: Callable[[], tinker.ServiceClient | MlflowClient],
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, f"http://me:{SECRET}@127.0.0.1:1")
    with pytest.raises(ConfigError, match=fix) as caught:
        use()
    assert SECRET not in str(caught.value)


def test_a_prefect_server_with_credentials_in_its_url_is_refused_and_hidden() -> None:
    with temporary_settings({PREFECT_API_URL: f"http://me:{SECRET}@127.0.0.1:1/api"}):
        with pytest.raises(ConfigError, match="remove it and set PREFECT_API_AUTH_STRING to USER:PASSWORD") as refused:
            check_prefect_url()
        shown = r"at http://\*\*\*@127\.0\.0\.1:1/api could not be used"
        with pytest.raises(ServiceError, match=shown) as failed, prefect_failures("start it"):
            raise httpx.ConnectError("refused")
    assert SECRET not in f"{refused.value}{failed.value}"


def test_a_deleted_object_of_prefect_is_not_blamed_on_the_server() -> None:
    with pytest.raises(ServiceError, match="it was deleted: run the same command again"), prefect_failures("start it"):
        raise ObjectNotFound(httpx.HTTPError("404"))


def test_errors_hide_the_password_of_a_database() -> None:
    with pytest.raises(ServiceError, match=r"at foo://\*\*\*@host/mlflow could not be used") as caught:
        MLflowTracking(tracking_uri=f"foo://me:{SECRET}@host/mlflow").get_client()
    assert SECRET not in str(caught.value)


def test_urls_without_credentials_are_accepted() -> None:
    for field, url in (("base_url", "http://host/a@b"), ("tracking", "sqlite:////tmp/a@b.db"), ("storage", "a@b")):
        assert getattr(validate_fields(SftConfig, {**FIELDS, field: url}), field) == url
    assert RunStorage(url="s3://bucket/a@b").run_directory("run").location

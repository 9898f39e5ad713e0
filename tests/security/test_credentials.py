"""User names and passwords in URLs reach no record and no message."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import tinker
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.errors import ConfigError, ServiceError
from blocks.prefect_errors import check_prefect_url, prefect_failures
from blocks.service import TinkerService
from blocks.storage import RunStorage
from blocks.tracking import MLflowTracking
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
        ("storage", f"s3://key:{SECRET}@bucket/runs", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_a_config_with_credentials_is_refused(field: str, url: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="has a user name or password, which would be recorded") as caught:
        validate_fields(SftConfig, {**FIELDS, field: url})
    assert fix in str(caught.value)
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


def test_errors_hide_the_password_of_a_database() -> None:
    with pytest.raises(ServiceError, match=r"at foo://\*\*\*@host/mlflow could not be used") as caught:
        MLflowTracking(tracking_uri=f"foo://me:{SECRET}@host/mlflow").get_client()
    assert SECRET not in str(caught.value)


def test_urls_without_credentials_are_accepted() -> None:
    for field, url in (("base_url", "http://host/a@b"), ("tracking", "sqlite:////tmp/a@b.db"), ("storage", "a@b")):
        assert getattr(validate_fields(SftConfig, {**FIELDS, field: url}), field) == url
    assert RunStorage(url="s3://bucket/a@b").run_directory("run").location

"""The run of a deployment sends the worker's keys only to the servers that the worker's environment names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest
import tinker

from blocks.default_service import default_service
from blocks.errors import ConfigError, ServiceError
from blocks.own_servers import check_own_service, check_own_tracking
from flows.config.train import SftConfig
from flows.runs.blocks import open_service, service_at, tracking_at, tracking_of

KEY, PASSWORD = "tml-of-the-worker", "password-of-the-worker"


class Listener(ThreadingHTTPServer):
    """HTTP server that rejects every request and keeps its headers."""

    headers: list[dict[str, str]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Listener)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.rfile.read(int(self.headers.get("content-length") or 0))
        is_health = self.path.endswith(("/healthz", "/health"))
        self.send_response(200 if is_health else 401)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(("127.0.0.1", 0), Handler) as server:
        server.headers = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the process of a deployment's flow run, whose worker has keys and names no servers."""
    for name in ("TINKER_FLOWS_SIGNED_RUN", "TINKER_FLOWS_RESTRICTED_RUN", "TINKER_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def config(**fields: str) -> SftConfig:
    return SftConfig.model_validate({"run_name": "a", "model": "tiny", "data": {"builder": "a:B"}, **fields})


def open_tracking(url: str) -> None:
    tracking_of(config(tracking=url)).get_client()


def list_models(url: str) -> None:
    service = service_at(url)
    assert service
    service.models()


def open_session(url: str) -> None:
    with open_service(config(base_url=url)) as service, service.session():
        pass


USES: dict[str, tuple[Callable[[str], None], str]] = {
    "tracking": (open_tracking, "MLFLOW_TRACKING_URI"),
    "models": (list_models, "TINKER_BASE_URL"),
    "session": (open_session, "TINKER_BASE_URL"),
}


@pytest.mark.parametrize("use", USES)
def test_only_a_server_of_the_environment_receives_its_keys(
    use: str, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, variable = USES[use]
    for own in ("", f"http://127.0.0.1:{listener.server_port + 1}", "https://tinker.example"):
        monkeypatch.setenv(variable, own)
        with pytest.raises(ConfigError, match=f"set {variable} of the worker") as refused:
            call(listener.url)
        assert listener.url in str(refused.value)
    assert listener.headers == []
    monkeypatch.setenv(variable, listener.url)
    with pytest.raises(ServiceError):
        call(f"http://localhost:{listener.server_port}")
    sent = {headers.get("x-api-key") or headers.get("authorization") for headers in listener.headers}
    assert sent > {None}, "only the request for its health has no key"


def test_a_terminal_may_use_any_server(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID")
    for call, _ in USES.values():
        with pytest.raises(ServiceError):
            call(listener.url)


def test_clients_of_builders_use_the_service_of_the_session_or_of_the_environment(listener: Listener) -> None:
    """Some builders of tinker-cookbook have a parameter base_url."""
    with default_service("http://10.0.0.1:8000", None):
        tinker.ServiceClient()
        tinker.ServiceClient(base_url="http://10.0.0.1:8000")
        tinker.ServiceClient(base_url="https://tinker.thinkingmachines.dev/services/tinker-prod")
        tinker.ServiceClient(base_url=listener.url, api_key="tml-of-the-config")
        with pytest.raises(ConfigError, match="may not send the worker's API key"):
            tinker.ServiceClient(base_url=listener.url)


def test_local_files_and_the_hosted_service_need_no_variable(tmp_path: Path) -> None:
    for uri in ("", f"sqlite:///{tmp_path}/a.db", f"sqlite+pysqlite:///{tmp_path}/a.db", "runs", f"file://{tmp_path}"):
        assert tracking_at(uri, "a").tracking_uri == uri
    service = service_at("https://tinker.thinkingmachines.dev/services/another")
    assert service
    assert service.resolved_url == "https://tinker.thinkingmachines.dev/services/another"


@pytest.mark.parametrize(
    "url",
    [
        "http://own:5001",
        "https://own:5000",
        "http://own.evil:5000",
        "http://evil@own:5000",
        "http://evil\\@own:5000",
        "http://own:5000\\@evil",
        "http://evil#@own:5000",
        "http://evil?@own:5000",
        "http://own:5000@evil",
        "http://own:5000 .evil",
        "http://ówn:5000",
        "//own:5000",
        "postgresql://own/db?host=evil",
        "databricks://evil",
    ],
)
def test_odd_urls_are_other_servers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://own:5000/path")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://own:5000")
    check_own_service("HTTP://OWN:5000/other")
    check_own_tracking("http://own:5000/")
    with pytest.raises(ConfigError):
        check_own_service(url)
    if url.startswith("//"):
        return  # MLflow reads it as a folder
    with pytest.raises(ConfigError):
        check_own_tracking(url)


def test_the_database_of_the_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me@own/db")
    check_own_tracking("postgresql://me@own/db")
    with pytest.raises(ConfigError):
        check_own_tracking("postgresql://me@own/db?host=evil")

"""Tinker service block, against real engines."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from blocks import TinkerService
from blocks.errors import ConfigError, ServiceError
from blocks.servers.processes import free_port
from blocks.service import is_set_in_environment


@pytest.fixture(autouse=True)
def no_ambient_service(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))  # `tinker auth login` stores a key in the home


def service(url: str, key: str | None = "tml-test", patience_s: float = 30) -> TinkerService:
    return TinkerService(base_url=url, api_key=SecretStr(key) if key else None, connect_timeout_s=patience_s)


def test_a_session_trains_a_checked_model(own_engine: TinkerService) -> None:
    own_engine.check_model("tiny")
    with own_engine.get_client() as session:
        assert session.create_lora_training_client("tiny", rank=4).result().get_info().model_data.model_name == "tiny"


def test_an_unknown_model_error_lists_the_known_models(own_engine: TinkerService) -> None:
    with pytest.raises(ConfigError) as caught:
        own_engine.check_model("Qwen/Qwen3-8B")
    assert str(caught.value) == (
        f"The service at {own_engine.base_url} has no model 'Qwen/Qwen3-8B'; it offers tiny: "
        "set `model` to one of them."
    )


def test_url_and_key_come_from_the_environment(own_engine: TinkerService, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_set_in_environment()
    assert own_engine.base_url is not None
    assert own_engine.api_key is not None
    monkeypatch.setenv("TINKER_BASE_URL", own_engine.base_url + "/")
    assert is_set_in_environment()
    monkeypatch.setenv("TINKER_API_KEY", own_engine.api_key.get_secret_value())
    assert TinkerService().resolved_url == own_engine.base_url
    TinkerService().check_model("tiny")
    monkeypatch.delenv("TINKER_BASE_URL")
    assert is_set_in_environment()


@pytest.mark.parametrize("method", ["get_client", "check_model"])
def test_a_wrong_key_is_rejected(own_engine: TinkerService, method: str) -> None:
    wrong = own_engine.model_copy(update={"api_key": SecretStr("tml-wrong")})
    with pytest.raises(ServiceError) as caught:
        wrong.get_client() if method == "get_client" else wrong.check_model("tiny")
    assert str(caught.value) == (
        f"The Tinker service at {own_engine.base_url} rejected the API key (401): "
        "set TINKER_API_KEY, or the key of the service block, to a valid one."
    )


@pytest.mark.parametrize(("key", "why"), [("other", "must start with the 'tml-' prefix"), (None, "must be set by")])
def test_an_invalid_key_is_rejected(own_engine: TinkerService, key: str | None, why: str) -> None:
    assert own_engine.base_url is not None
    with pytest.raises(ServiceError, match=rf"could not be used \(.*{why}.*\): check base_url and TINKER_API_KEY\.$"):
        service(own_engine.base_url, key).get_client()


def test_an_unreachable_service_is_named_immediately() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceError) as caught:
        service(url).check_model("tiny")
    assert str(caught.value) == (
        f"The Tinker service at {url} does not respond ([Errno 111] Connection refused): "
        "check base_url and the network, or start a local one with `python -m engine`."
    )


class Broken(http.server.BaseHTTPRequestHandler):
    """Server that is healthy but responds with 503 to every other request, which the SDK retries."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/healthz") else 503)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def broken_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_service_that_only_returns_503_times_out(broken_url: str) -> None:
    with pytest.raises(ServiceError, match=r"did not complete a request within 0\.5 s: check base_url"):
        service(broken_url, patience_s=0.5).get_client()

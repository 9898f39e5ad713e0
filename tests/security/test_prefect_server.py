"""The Prefect server that a run starts refuses requests of other users of the machine and of pages of other origins."""

from __future__ import annotations

import base64
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from blocks.servers.logins import server_login
from blocks.servers.processes import starting_prefect_server


def allowed_origin(api: str, origin: str) -> str | None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{api}/flow_runs/filter", headers=headers, timeout=60)
    return response.headers.get("access-control-allow-origin")


@pytest.mark.process
def test_the_prefect_server_of_a_run_requires_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    with starting_prefect_server() as server:
        server.wait()
        pool = {"name": "another", "type": "process"}
        for login in (None, ("tinker-flows", "guessed")):
            assert httpx.post(f"{server.url}/work_pools/", json=pool, auth=login, timeout=60).status_code == 401
            assert httpx.post(f"{server.url}/flow_runs/filter", json={}, auth=login, timeout=60).status_code == 401
        for origin in ("https://evil.example", "http://localhost:9999"):
            assert allowed_origin(server.url, origin) is None
        page = server.url.removesuffix("/api")
        assert allowed_origin(server.url, page) == page

        own = server_login(tmp_path / "home")
        assert server.login == own.of_prefect
        headers = {"Authorization": f"Basic {base64.b64encode(server.login.encode()).decode()}"}
        assert httpx.post(f"{server.url}/work_pools/", json=pool, headers=headers, timeout=60).status_code == 201
        settings = {PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: server.login}
        with temporary_settings(settings), get_client(sync_client=True) as client:
            assert client.read_work_pool("another").type == "process"
    message = capsys.readouterr().err
    assert f"(log in with tinker-flows:$(cat {tmp_path}/home/servers.key)" in message
    assert own.password not in message

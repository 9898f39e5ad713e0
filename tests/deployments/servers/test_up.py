"""`tinker-flows up`: all services start with one command and stop without leftovers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from browser import browser, page_text, wait_for_text
from chaos.servers import MARK, processes_of
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from blocks.errors import ServiceError, StorageError
from blocks.servers.logins import server_login
from blocks.tracking import MLflowTracking
from deployments.servers import local_stack
from deployments.servers.automations import install_all
from deployments.servers.health import Service, wait_until_ready
from deployments.servers.local_stack import LocalStack, choose_port, engine_key, record_stack, stack_lock

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "deployments.command_line", "up"]


@dataclass(frozen=True, slots=True)
class Up:
    """`tinker-flows up` in a separate process."""

    process: subprocess.Popen[bytes]
    home: Path
    out: Path

    def state_file(self) -> dict[str, Any]:
        return json.loads((self.home / "up.json").read_text())

    def login(self) -> tuple[str, str]:
        exports = self.state_file()["exports"]
        return exports["MLFLOW_TRACKING_USERNAME"], exports["MLFLOW_TRACKING_PASSWORD"]

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request to its Prefect server."""
        url = f"{self.state_file()['exports']['PREFECT_API_URL']}/{path}"
        response = httpx.request(method, url, json=body, auth=self.login(), timeout=60)
        response.raise_for_status()
        return response.json()

    def start_run(self, run_name: str, **fields: Any) -> str:
        """Start a run of the deployment `sft` on the exported services; return its flow run id."""
        deployment = self.request("GET", "deployments/name/sft/sft")
        config = deployment["parameters"]["config"] | {"run_name": run_name, "base_url": "", "objective": {}, **fields}
        body = {"parameters": {"config": config}, "name": run_name}
        return self.request("POST", f"deployments/{deployment['id']}/create_flow_run", body)["id"]

    def set_state(self, flow_run: str, kind: str, name: str) -> None:
        """Set the state of a flow run, as the UI does for Cancel and Retry."""
        body = {"state": {"type": kind, "name": name}, "force": kind == "SCHEDULED"}
        assert self.request("POST", f"flow_runs/{flow_run}/set_state", body)["status"] == "ACCEPT"

    def state(self, flow_run: str) -> str:
        return self.request("GET", f"flow_runs/{flow_run}")["state"]["type"]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TINKER_FLOWS_HOME": str(home), MARK: str(home)}


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[Up]:
    """Start `tinker-flows up` without waiting; kill all its processes at the end."""
    home.mkdir(exist_ok=True)
    out = home.with_suffix(".out")
    with out.open("ab") as output:
        process = subprocess.Popen(
            [*COMMAND, *arguments], cwd=ROOT, env=environment(home), stdout=output, stderr=output
        )
    try:
        yield Up(process, home, out)
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(str(home)):
            os.kill(pid, signal.SIGKILL)


def wait_for(up: Up, condition: Callable[[], T], limit_s: float = 400) -> T:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        assert up.process.poll() is None, up.out.read_text()
        time.sleep(0.2)
    raise AssertionError(f"not within {limit_s} s: {up.out.read_text()}")


def until_ready(up: Up) -> None:
    wait_for(up, lambda: "Ready in " in up.out.read_text())


def all_ended(home: Path) -> bool:
    deadline = time.monotonic() + 120
    while processes_of(str(home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes_of(str(home))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_up_runs_a_deployment_stops_and_resumes_on_the_next_start(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with started(home, "--engine-model", "tiny") as up:
        until_ready(up)
        first, *later = [line for line in up.out.read_text().splitlines() if line.startswith("waiting for ")]
        assert first == "waiting for Prefect server"
        assert any("Worker" in line and "Deployments" in line for line in later)
        exports = up.state_file()["exports"]
        for endpoint in up.state_file()["endpoints"]:
            headers = {"Accept": "text/html"}
            page = httpx.get(endpoint["url"], headers=headers, auth=up.login(), follow_redirects=True, timeout=60)
            assert page.status_code == 200, endpoint
            assert Path(endpoint["log"]).exists()
        for name, value in exports.items():
            assert f"export {name}={value}" in up.out.read_text()
        assert (home / "up.json").stat().st_mode & 0o077 == 0

        second = subprocess.run(COMMAND, cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=120)
        assert second.returncode == 1
        assert f"already runs in this project home as process {up.process.pid}" in second.stderr

        first_run = up.start_run("first", num_steps=2, eval_every=0)
        wait_for(up, lambda: up.state(first_run) in ("COMPLETED", "FAILED", "CRASHED"))
        assert up.state(first_run) == "COMPLETED"
        config = json.loads((home / "runs" / "first" / "config.json").read_text())
        assert config["base_url"] == config["tracking"] == ""
        assert mlflow_runs(exports) == {"first": exports["TINKER_BASE_URL"]}

        long_run = up.start_run("long", num_steps=5000, num_epochs=5000, eval_every=0, checkpoint_every=2)
        checkpoints = home / "runs" / "long" / "checkpoints.jsonl"
        wait_for(up, checkpoints.exists)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(120) == 0, up.out.read_text()
        assert processes_of(str(home)) == []
        steps = len(checkpoints.read_text().splitlines())
        assert "All services are stopped." in up.out.read_text()

    up.out.unlink()
    with started(home, "--engine-model", "tiny") as up:
        until_ready(up)
        for name in ("TINKER_API_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"):
            assert up.state_file()["exports"][name] == exports[name]
        assert up.state(first_run) == "COMPLETED"
        assert set(mlflow_runs(up.state_file()["exports"])) == {"first", "long"}
        # The deployment has the restart tag, so the run resumes with the new worker.
        wait_for(up, lambda: len(checkpoints.read_text().splitlines()) > steps)
        assert up.state(long_run) == "RUNNING"
        up.set_state(long_run, "CANCELLING", "Cancelling")
        wait_for(up, lambda: up.state(long_run) == "CANCELLED")
        names = [state["name"] for state in up.request("GET", f"flow_run_states/?flow_run_id={long_run}")]
        assert names[names.index("Cancelling") :] in (
            ["Cancelling", "Cancelled"],
            ["Cancelling", "Cancelled", "Cancelled"],
        )
        steps = len(checkpoints.read_text().splitlines())
        up.set_state(long_run, "SCHEDULED", "AwaitingRetry")
        wait_for(up, lambda: len(checkpoints.read_text().splitlines()) > steps)
        up.process.kill()
        assert all_ended(home)


def mlflow_runs(exports: dict[str, str]) -> dict[str, str]:
    """Return the Tinker service URL of each run on the MLflow server by run name."""
    uri = f"{exports['MLFLOW_TRACKING_URI']}/api/2.0/mlflow"
    login = (exports["MLFLOW_TRACKING_USERNAME"], exports["MLFLOW_TRACKING_PASSWORD"])
    experiment = httpx.get(f"{uri}/experiments/get-by-name?experiment_name=tinker-flows", auth=login, timeout=60).json()
    body = {"experiment_ids": [experiment["experiment"]["experiment_id"]]}
    runs = httpx.post(f"{uri}/runs/search", json=body, auth=login, timeout=60).json().get("runs", [])
    tags = [{tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in runs]
    return {run["info"]["run_name"]: run_tags["tinker.base_url"] for run, run_tags in zip(runs, tags, strict=True)}


@pytest.mark.process
@pytest.mark.timeout(600)
def test_prefect_and_mlflow_refuse_requests_without_the_login(
    tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    with started(home, "--no-engine") as up:
        until_ready(up)
        exports = up.state_file()["exports"]
        api, mlflow = exports["PREFECT_API_URL"], exports["MLFLOW_TRACKING_URI"]
        user, password = up.login()

        for url in (f"{api}/deployments/name/sft/sft", f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=1"):
            assert httpx.get(url, timeout=60).status_code == 401
            assert httpx.get(url, auth=(user, "guessed"), timeout=60).status_code == 401
            assert httpx.get(url, auth=(user, password), timeout=60).status_code == 200
        for url in (f"{api}/health", f"{mlflow}/health", f"{mlflow}/api/3.0/mlflow/server-info"):
            assert httpx.get(url, timeout=60).status_code == 200
            with pytest.raises(httpx.ConnectError):  # another address of this machine
                httpx.get(url.replace("127.0.0.1", "127.0.0.2"), timeout=60)
        assert subscription_end(api, "guessed") == 1008
        assert subscription_end(api, f"{user}:{password}") is None
        for origin in ("http://elsewhere.example", "http://localhost:9999"):
            assert allowed_origin(api, origin) is None
        assert allowed_origin(api, api.removesuffix("/api")) == api.removesuffix("/api")

        assert mlflow_status(up, mlflow) == 200
        for host in ("elsewhere.example", "10.elsewhere.example", "192.168.1.1"):
            assert mlflow_status(up, mlflow, Host=host) == 403
        assert mlflow_status(up, mlflow, Host=mlflow.replace("http://127.0.0.1", "localhost")) == 200
        assert mlflow_status(up, mlflow, Origin="http://elsewhere.example") == 403
        # The documented exception: MLflow accepts the pages of all ports of this machine.
        assert mlflow_status(up, mlflow, Origin="http://localhost:9999") == 200

        assert f"log in to Prefect with {user}:{password} and to MLflow as user {user}" in up.out.read_text()
        for name in ("servers.key", "up.json", "mlflow-auth.db", "mlflow-auth.ini"):
            assert (home / name).stat().st_mode & 0o077 == 0, name
        for pid in processes_of(str(home)):
            assert password not in Path(f"/proc/{pid}/cmdline").read_text()

        with (
            temporary_settings({PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: f"{user}:guessed"}),
            pytest.raises(ServiceError, match=r"rejects the login \(401\): set PREFECT_API_AUTH_STRING"),
        ):
            install_all()
        with pytest.raises(ServiceError, match=r"rejects the login \(401\): set MLFLOW_TRACKING_USERNAME"):
            MLflowTracking(tracking_uri=mlflow).get_client()
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        MLflowTracking(tracking_uri=mlflow).get_client()

        service = {"TINKER_BASE_URL": engine_url, "TINKER_API_KEY": "tml-test"}
        command = [*COMMAND[:-1], "run", "sft", "--config", "examples/sft.yaml", "run_name=by-itself", "model=tiny"]
        command += ["num_steps=1", "eval_every=0", "objective.regularizers=[]", "report.num_examples=0"]
        run = subprocess.run(
            command, cwd=ROOT, env=environment(home) | service, capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stderr
        assert f"Using the Prefect server of `tinker-flows up` at {api}" in run.stderr
        assert "did not accept" not in run.stderr
        (flow_run,) = up.request("POST", "flow_runs/filter", {"flow_runs": {"deployment_id": {"is_null_": True}}})
        assert flow_run["state"]["type"] == "COMPLETED"
        assert up.request("POST", "logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}})
        doctor = subprocess.run(
            [*COMMAND[:-1], "doctor"], cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=300
        )
        assert "(of the running `tinker-flows up`)" in " ".join(doctor.stdout.replace("│", " ").split())


def mlflow_status(up: Up, mlflow: str, **headers: str) -> int:
    """Return the status of a request to MLflow, with its login, that a page of another origin may not send."""
    body = {"max_results": 1}
    url = f"{mlflow}/api/2.0/mlflow/experiments/search"
    return httpx.post(url, json=body, headers=headers, auth=up.login(), timeout=60).status_code


def subscription_end(api: str, token: str) -> int | None:
    """Return the code with which the server closes a subscription to its events, or None if it accepts the token."""
    url = f"{api.replace('http', 'ws', 1)}/events/out"
    with connect(url, subprotocols=[Subprotocol("prefect")]) as subscription:
        subscription.send(json.dumps({"type": "auth", "token": token}))
        try:
            assert json.loads(subscription.recv())["type"] == "auth_success"
        except ConnectionClosed as end:
            return end.rcvd.code if end.rcvd else 0
    return None


def allowed_origin(api: str, origin: str) -> str | None:
    """Return the origin that the server allows to send a request from a page of another origin."""
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{api}/flow_runs/filter", headers=headers, timeout=60)
    return response.headers.get("access-control-allow-origin")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_browser_logs_in_to_both_uis(tmp_path: Path) -> None:
    with started(tmp_path / "home", "--no-engine") as up, browser() as driver:
        until_ready(up)
        exports = up.state_file()["exports"]
        ui = exports["PREFECT_API_URL"].removesuffix("/api")
        user, password = up.login()
        for host in ("127.0.0.1", "localhost"):
            driver.get(f"{ui.replace('127.0.0.1', host)}/deployments")
            wait_for_text(driver, "Login")
            driver.find_element(By.XPATH, "//input[@type='password']").send_keys(f"{user}:{password}", Keys.ENTER)
            wait_for_text(driver, "on_policy_distillation")

        mlflow = exports["MLFLOW_TRACKING_URI"]
        driver.get(mlflow)
        assert "Experiments" not in page_text(driver)
        driver.get(mlflow.replace("://", f"://{user}:{password}@"))
        wait_for_text(driver, "Experiments")


@pytest.mark.slow
def test_a_failed_service_stops_the_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with started(home, "--engine-model", "/absent") as up:
        assert up.process.wait(200) == 1
        assert "The local Engine (/absent) did not start: " in up.out.read_text()
        assert processes_of(str(home)) == []
    assert (home / "up.json").read_text() == ""


def test_a_second_up_is_told_about_the_first(tmp_path: Path) -> None:
    with stack_lock(tmp_path) as lock_file:
        record_stack(lock_file, LocalStack(os.getpid(), (), {}))
        with pytest.raises(StorageError, match=f"as process {os.getpid()} .still starting."), stack_lock(tmp_path):
            pass
    with stack_lock(tmp_path):
        assert (tmp_path / "up.json").stat().st_mode & 0o077 == 0


@pytest.mark.process
def test_up_waits_for_the_services_of_a_killed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "up.json").open("a+") as lock_file:
        with subprocess.Popen(["true"]) as ended:
            pass
        record_stack(lock_file, LocalStack(ended.pid, (), {}))
        hold = (
            "import fcntl, time; fcntl.flock(int(__import__('sys').argv[1]), fcntl.LOCK_EX); print(); time.sleep(1.5)"
        )
        service = subprocess.Popen(
            [sys.executable, "-c", hold, str(lock_file.fileno())], pass_fds=[lock_file.fileno()], stdout=subprocess.PIPE
        )
        assert service.stdout is not None
        service.stdout.readline()
    with service, stack_lock(tmp_path):
        assert service.poll() is not None
    assert "Waiting for the services of the previous" in capsys.readouterr().err


def test_services_that_do_not_stop_are_not_called_a_running_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_stack, "SHUTDOWN_LIMIT_S", 0.1)
    with (tmp_path / "up.json").open("a+") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        with (
            pytest.raises(StorageError, match="or services of one that has ended have not stopped"),
            stack_lock(tmp_path),
        ):
            pass


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"No space left on device"), stack_lock(tmp_path):
        pass
    assert (tmp_path / "up.json").read_bytes() == b""


@pytest.mark.process
def test_a_wait_is_announced_whenever_a_service_becomes_ready(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        engine, worker = (Service(name, "", tmp_path / name, process) for name in ("Engine", "Worker"))
        ready = {engine: iter([False, False, True]), worker: iter([False, False, False, False, True])}
        announced: list[str] = []
        wait_until_ready(
            [engine, worker], {service: partial(next, ready[service]) for service in ready}, announced.append
        )
        process.kill()
    assert announced == ["waiting for Engine, Worker", "waiting for Worker"]


def test_choose_port_avoids_a_port_in_use() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert choose_port(port) != port
    assert choose_port(port) == port


def test_engine_key_is_stable_and_private(tmp_path: Path) -> None:
    key = engine_key(tmp_path)
    assert key.startswith("tml-")
    assert engine_key(tmp_path) == key
    assert (tmp_path / "engine.key").stat().st_mode & 0o077 == 0


def test_login_is_stable_and_private(tmp_path: Path) -> None:
    login = server_login(tmp_path)
    assert server_login(tmp_path) == login
    assert len(login.password) >= 32
    assert (tmp_path / "servers.key").stat().st_mode & 0o077 == 0

"""Monitoring: metrics, queue statistics, status page and request log; and the clock of training requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from engine_process import EngineProcess, running_engine
from tinker import types
from waiting import wait_for

from engine.service.futures import Futures, WireResponse
from engine.service.history import ModelJournal
from engine.service.journal import Journal
from engine.service.metrics import Metrics
from engine.service.ordered_queue import Clock, OrderedQueue, QueuedRequest, QueueServices

KEY = "tml-monitoring"


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    arguments = ["--clock-cycle", "0.1", "--log-requests"]
    environment = {"TINKER_ENGINE_API_KEY": KEY}
    with running_engine(tmp_path_factory.mktemp("observed"), arguments=arguments, environment=environment) as engine:
        yield engine


@pytest.fixture
def http(observed: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=observed.url, headers={"X-API-Key": KEY}) as client:
        yield client


@pytest.fixture
def trained(observed: EngineProcess, batch: list[types.Datum]) -> Iterator[tinker.TrainingClient]:
    """Training client after one step."""
    with tinker.ServiceClient(base_url=observed.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=4).result()
        output = trainer.forward_backward(batch, "cross_entropy")
        trainer.optim_step(types.AdamParams()).result()
        output.result()
        yield trainer


@pytest.mark.process
def test_prometheus_metrics(http: httpx.Client, trained: tinker.TrainingClient, batch: list[types.Datum]) -> None:
    text = http.get("/metrics").text
    metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(metrics["tinker_engine_models"]) == 1
    assert float(metrics["tinker_engine_adapter_bytes"]) > 0
    assert float(metrics["tinker_engine_busy_seconds"]) > 0
    assert float(metrics['tinker_engine_operation_seconds_count{kind="optim_step",outcome="done"}']) >= 1
    tokens = sum(len(datum.model_input.to_ints()) for datum in batch)
    assert float(metrics['tinker_engine_tokens_total{use="trained"}']) % tokens == 0
    assert float(metrics['tinker_engine_http_responses_total{route="/optim_step",status="200"}']) >= 1


@pytest.mark.process
def test_prefill_tokens_requested_and_computed(observed: EngineProcess, http: httpx.Client) -> None:
    def tokens(kind: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith(f"tinker_engine_prefill_tokens_{kind} "))
        return float(line.split()[1])

    before = tokens("requested"), tokens("computed")
    with tinker.ServiceClient(base_url=observed.url, api_key=KEY) as service:
        prompt = types.ModelInput.from_ints(list(b"to be or not"))
        sampler = service.create_sampling_client(base_model="tiny").result()
        sampler.sample(prompt, num_samples=3, sampling_params=types.SamplingParams(max_tokens=2)).result()
    assert (tokens("requested") - before[0], tokens("computed") - before[1]) == (3 * 12, 12)


@pytest.mark.process
def test_queue_statistics(http: httpx.Client, trained: tinker.TrainingClient) -> None:
    # Request 3 was never sent, so request 4 waits.
    http.post("/api/v1/optim_step", json={"model_id": trained.model_id, "seq_id": 4, "adam_params": {}})
    stats = http.get(f"/runs/{trained.model_id}/queue/stats").json()
    assert stats == {"model_id": trained.model_id, "waiting": 1, "running": None, "next_seq_id": 3, "accepted": 4}
    statuses = [http.get(f"/runs/{trained.model_id}/requests/{trained.model_id}:{n}/status") for n in (2, 3, 4)]
    assert [s.json().get("status") for s in statuses] == ["finished", None, "waiting"]
    assert statuses[1].status_code == 404


@pytest.mark.process
def test_status_of_a_failed_request(http: httpx.Client, observed: EngineProcess) -> None:
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    content = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 1}}
    model = http.post("/api/v1/create_model", json=content).json()["model_id"]
    for seq_id, name in ((1, "fine"), (2, "not/a/name")):
        save = {"model_id": model, "seq_id": seq_id, "path": name, "overwrite": False}
        request_id = http.post("/api/v1/save_weights", json=save).json()["request_id"]
        failed = "error" in http.post("/api/v1/retrieve_future", json={"request_id": request_id}).json()
        status = http.get(f"/runs/{model}/requests/{request_id}/status").json()["status"]
        assert (failed, status) == ((False, "finished") if seq_id == 1 else (True, "failed"))


@pytest.mark.process
def test_status_page_needs_the_key_for_its_data(observed: EngineProcess, http: httpx.Client) -> None:
    page = httpx.get(observed.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "tinker-flows engine" in page.text
    assert not [external for external in ("src=", "http:", "https:") if external in page.text]
    assert httpx.get(f"{observed.url}/status").status_code == 401
    assert http.get("/status").json()["bases"] == ["tiny"]


@pytest.mark.process
def test_requests_are_logged_as_json_lines(observed: EngineProcess, http: httpx.Client) -> None:
    http.get("/status/of-the-log-test", headers={"X-API-Key": "tml-wrong"})

    def logged_lines() -> list[dict[str, Any]]:
        lines = [line.partition("{")[2] for line in observed.log.read_text().splitlines(keepends=True)]
        return [json.loads("{" + line) for line in lines if '"route"' in line and line.endswith("\n")]

    # The engine writes the line after it has sent the response.
    line = wait_for(
        lambda: next((line for line in logged_lines() if line["path"] == "/status/of-the-log-test"), None),
        "the request in the log",
    )
    assert (line["method"], line["status"], line["client"]) == ("GET", 401, "127.0.0.1")
    assert "tml-" not in json.dumps(logged_lines())


def test_engine_without_key_rejects_foreign_hosts(engine_url: str) -> None:
    assert httpx.get(f"{engine_url}/status").status_code == 200
    assert httpx.get(f"{engine_url}/status", headers={"Host": "example.org"}).status_code == 403


class ManualClock(Clock):
    """Clock that ticks when `ticks` is released."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ticks = asyncio.Semaphore(0)

    async def tick(self) -> None:
        await self.ticks.acquire()


def test_tick_runs_all_consecutive_requests(tmp_path: Path) -> None:
    """Requests that are queued when a tick runs are executed on it; later ones and ones behind a gap wait."""
    finished: list[int] = []

    async def run() -> None:
        clock = ManualClock()
        services = QueueServices(Futures(), clock, Metrics(dict), max_waiting=10)
        queue = OrderedQueue("m", services, ModelJournal(Journal(tmp_path / "journal"), "m"))

        def submit(seq_id: int) -> None:
            async def work() -> WireResponse:
                finished.append(seq_id)
                if seq_id == 1:
                    submit(2)
                return WireResponse(b"")

            queue.submit(QueuedRequest(seq_id, "forward_backward", bytes([seq_id]), True, work))

        for seq_id in (1, 4, 0):
            submit(seq_id)
        for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3, 4]):
            if len(expected) == 5:
                submit(3)
            clock.ticks.release()
            for _ in range(20):
                await asyncio.sleep(0)
            assert finished == expected

    asyncio.run(run())

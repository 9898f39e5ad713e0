"""What an onlooker sees: figures, queues, the page, the log; and the clock that work may be bound to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from engine_process import EngineProcess, running_engine
from tinker import types

from engine.service.clock import Clock
from engine.service.futures import Answer, Futures
from engine.service.history import Notes
from engine.service.journal import Journal
from engine.service.metrics import Metrics
from engine.service.ordered import OrderedQueue, QueueServices, Request

KEY = "tml-onlooker"


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
    """A model after one step."""
    with tinker.ServiceClient(base_url=observed.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=4).result()
        output = trainer.forward_backward(batch, "cross_entropy")
        trainer.optim_step(types.AdamParams()).result()
        output.result()
        yield trainer


def test_figures_are_there_for_prometheus(
    http: httpx.Client, trained: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    text = http.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["tinker_engine_models"]) == 1
    assert float(figures["tinker_engine_adapter_bytes"]) > 0
    assert float(figures["tinker_engine_busy_seconds"]) > 0
    assert float(figures['tinker_engine_operation_seconds_count{kind="optim_step",outcome="done"}']) >= 1
    tokens = sum(len(datum.model_input.to_ints()) for datum in batch)
    assert float(figures['tinker_engine_tokens_total{use="trained"}']) % tokens == 0
    assert float(figures['tinker_engine_http_responses_total{route="/optim_step",status="200"}']) >= 1


def test_a_queue_tells_what_waits(http: httpx.Client, trained: tinker.TrainingClient) -> None:
    # There is no request 3: number 4 waits.
    http.post("/api/v1/optim_step", json={"model_id": trained.model_id, "seq_id": 4, "adam_params": {}})
    stats = http.get(f"/runs/{trained.model_id}/queue/stats").json()
    assert stats == {"model_id": trained.model_id, "waiting": 1, "running": None, "next_seq_id": 3, "accepted": 4}
    statuses = [http.get(f"/runs/{trained.model_id}/requests/{trained.model_id}:{n}/status") for n in (2, 3, 4)]
    assert [s.json().get("status") for s in statuses] == ["finished", None, "waiting"]
    assert statuses[1].status_code == 404


def test_the_page_is_there_and_asks_for_the_key(observed: EngineProcess, http: httpx.Client) -> None:
    page = httpx.get(observed.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "tinker-flows engine" in page.text
    assert not [part for part in ("src=", "http:", "https:") if part in page.text]
    assert httpx.get(f"{observed.url}/status").status_code == 401
    assert http.get("/status").json()["bases"] == ["tiny"]


def test_a_request_is_a_line_of_the_log(observed: EngineProcess, http: httpx.Client) -> None:
    http.get("/status", headers={"X-API-Key": "tml-wrong"})
    lines = [line.partition("{")[2] for line in observed.log.read_text().splitlines() if '"route"' in line]
    last = [line for line in (json.loads("{" + line) for line in lines) if line["path"] == "/status"][-1]
    assert (last["method"], last["status"], last["client"]) == ("GET", 401, "127.0.0.1")
    assert "tml-" not in "".join(lines)


def test_an_engine_without_a_key_answers_to_this_machine_only(engine_url: str) -> None:
    assert httpx.get(f"{engine_url}/status").status_code == 200
    assert httpx.get(f"{engine_url}/status", headers={"Host": "example.org"}).status_code == 403


class HandClock(Clock):
    """Ticks when it is told to."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ticks = asyncio.Semaphore(0)

    async def tick(self) -> None:
        await self.ticks.acquire()


def test_what_is_there_at_a_tick_runs_on_it(tmp_path: Path) -> None:
    """A step sent behind its pass runs on the same tick; what comes later, or out of order, waits for the next."""
    done: list[int] = []

    async def run() -> None:
        clock = HandClock()
        services = QueueServices(Futures(), clock, Metrics(dict), max_waiting=10)
        queue = OrderedQueue("m", services, Notes(Journal(tmp_path / "journal"), "m"))

        def submit(seq_id: int) -> None:
            async def work() -> Answer:
                done.append(seq_id)
                if seq_id == 1:
                    submit(2)
                return Answer(b"")

            queue.submit(Request(seq_id, "forward_backward", bytes([seq_id]), True, work))

        for seq_id in (1, 4, 0):
            submit(seq_id)
        for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3, 4]):
            if len(expected) == 5:
                submit(3)
            clock.ticks.release()
            for _ in range(20):
                await asyncio.sleep(0)
            assert done == expected

    asyncio.run(run())

"""Sampling for many clients at once: in turn, given up, sent away, and beside training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from engine_process import API_KEY, running_engine
from sampling_jobs import make_job
from tinker import types

from engine.compute.base import BaseModel
from engine.routes.app import make_app
from engine.service import sampling_queue
from engine.service.engine import Engine
from engine.service.sampling_queue import SamplingQueue
from engine.service.settings import Settings
from engine.service.worker import Worker

PROMPT = types.ModelInput.from_ints(list(b"to be or"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(models=("tiny",), state=tmp_path / "state", cache=tmp_path, max_waiting_samples=4)


def endless_parts() -> Generator[None, None, None]:
    while True:
        yield


async def until_idle(queue: SamplingQueue) -> None:
    while queue.is_busy:
        await asyncio.sleep(0.001)


def test_a_long_queue_of_samples_holds_up_no_other_client(
    base: BaseModel, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the batch has room for two rows, the other client's row is among the next two that join."""
    monkeypatch.setattr(sampling_queue, "MAX_ROWS", 2)

    async def main() -> list[str]:
        queue, finished = SamplingQueue(base, Worker(), settings), []

        async def ask(client: str, seed: int) -> None:
            await queue.ask(client, make_job(seed, max_tokens=10), lambda: None)
            finished.append(client)

        many = [asyncio.create_task(ask("many", seed)) for seed in range(20)]
        await many[0]
        came = len(finished)
        await asyncio.create_task(ask("one", 99))
        between = finished[came:]
        await asyncio.gather(*many)
        return between

    between = asyncio.run(main())
    assert between[-1] == "one"
    assert len(between) <= 6


def test_training_goes_on_beside_endless_sampling(base: BaseModel, settings: Settings) -> None:
    """And the other way round: both have had their turns before either is through."""

    async def main() -> tuple[int, bool]:
        worker = Worker()
        queue = SamplingQueue(base, worker, settings)
        sampling = asyncio.create_task(queue.ask("client", make_job(1, max_tokens=2000), lambda: None))
        pieces = 0
        while not sampling.done() and pieces < 10:
            await worker.run(lambda: base.hidden(make_job(2, length=64).prompt_T[None]), "model")
            pieces += 1
        trained_meanwhile = not sampling.done()
        more = asyncio.create_task(worker.run_parts(endless_parts(), "model"))
        await queue.ask("other", make_job(3, max_tokens=2), lambda: None)
        sampled_meanwhile = not more.done()
        sampling.cancel()
        more.cancel()
        return pieces, trained_meanwhile and sampled_meanwhile

    pieces, both = asyncio.run(main())
    assert pieces == 10
    assert both


def test_work_that_nobody_waits_for_stops(base: BaseModel, settings: Settings) -> None:
    async def main() -> int:
        queue = SamplingQueue(base, Worker(), settings)
        endless = [asyncio.create_task(queue.ask("a", make_job(n, max_tokens=4000), lambda: None)) for n in range(3)]
        kept = asyncio.create_task(queue.ask("b", make_job(9, max_tokens=40), lambda: None))
        await queue.ask("c", make_job(8, max_tokens=5), lambda: None)
        for task in endless:
            task.cancel()
        result = await kept
        await until_idle(queue)
        return len(result.sequences[0].tokens)

    assert asyncio.run(main()) == 40


def test_a_failure_is_that_of_its_requests_only(base: BaseModel, settings: Settings) -> None:
    def broken() -> None:
        raise RuntimeError("no such file")

    async def main() -> int:
        queue = SamplingQueue(base, Worker(), settings)
        good = asyncio.create_task(queue.ask("a", make_job(1, max_tokens=30), lambda: None))
        with pytest.raises(RuntimeError, match="no such file"):
            await queue.ask("b", make_job(2), broken)
        return len((await good).sequences[0].tokens)

    assert asyncio.run(main()) == 30


@asynccontextmanager
async def served(base: BaseModel, settings: Settings) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """The engine's routes without a socket."""
    engine = Engine(settings, {"tiny": base})
    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1", timeout=60) as http:
        yield engine, http
    engine.worker.stop()


def asked(sampler: str, seq_id: int, **params: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT.to_ints()}]},
        "sampling_params": {"stop": [], "max_tokens": 3000, **params},
    }


def test_too_many_are_sent_away_and_may_come_again(base: BaseModel, settings: Settings) -> None:
    """The same request, under the same number; and what was sent before is given up on demand."""

    async def main() -> None:
        async with served(base, settings) as (_, http):
            session = (await http.post("create_session", json={})).json()["session_id"]
            made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            sampler = (await http.post("create_sampling_session", json=made)).json()["sampling_session_id"]
            answers = [await http.post("asample", json=asked(sampler, seq_id)) for seq_id in range(12)]
            accepted = [answer.json()["request_id"] for answer in answers if answer.status_code == 200]
            refused = [seq_id for seq_id, answer in enumerate(answers) if answer.status_code == 429]
            assert refused
            assert len(accepted) + len(refused) == 12
            assert "ask again in a second" in answers[refused[0]].json()["detail"]
            for request_id in accepted:
                assert (await http.post("cancel_future", json={"request_id": request_id})).status_code == 200
                failed = (await http.post("retrieve_future", json={"request_id": request_id})).json()
                assert failed == {"error": "The request was cancelled.", "category": "user"}
            again = await http.post("asample", json=asked(sampler, refused[0], max_tokens=3))
            # Under its number it had never come, so other content is no conflict.
            assert again.status_code == 200
            result = await http.post("retrieve_future", json={"request_id": again.json()["request_id"]})
            assert result.headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_a_finished_session_takes_its_samples_along(base: BaseModel, settings: Settings) -> None:
    async def main() -> None:
        async with served(base, settings) as (engine, http):
            session = (await http.post("create_session", json={})).json()["session_id"]
            made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            sampler = (await http.post("create_sampling_session", json=made)).json()["sampling_session_id"]
            queue = engine.sampler(sampler).queue
            assert (await http.post("asample", json=asked(sampler, 0))).status_code == 200
            await http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
            await until_idle(queue)

    asyncio.run(main())


def test_an_abandoned_sample_is_cancelled_by_the_sdk(engine_url: str, service: tinker.ServiceClient) -> None:
    """The SDK tells the engine, which answers whoever asks for the result that it was cancelled."""
    client = service.create_sampling_client(base_model="tiny").result()
    future = client.sample(PROMPT, 8, types.SamplingParams(max_tokens=4000, stop=[]))
    quick = client.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=[]))
    sequence_id = quick.result().sequences[0].sequence_id
    future.future().cancel()
    sampler_id = sequence_id.rsplit(":", 2)[0]
    with httpx.Client(base_url=f"{engine_url}/api/v1", timeout=60) as http:
        answers = [http.post("retrieve_future", json={"request_id": f"{sampler_id}:{n}"}) for n in range(2)]
    assert "cancelled" in next(a.text for a in answers if a.headers["content-type"] == "application/json")


def test_one_request_waits_for_all_samples(tmp_path: Path, service: tinker.ServiceClient) -> None:
    """With retrieve_futures: the same tokens as without, failures included, also from a copy of the client."""
    params = types.SamplingParams(max_tokens=6, stop=[], seed=3)
    here = service.create_sampling_client(base_model="tiny").result()
    expected = here.sample(PROMPT, 2, params).result()
    with (
        running_engine(tmp_path / "engine", arguments=["--retrieve-futures"]) as engine,
        tinker.ServiceClient(base_url=engine.url, api_key=API_KEY) as other,
    ):
        client = other.create_sampling_client(base_model="tiny").result()
        futures = [client.sample(PROMPT, 2, params) for _ in range(30)]
        bad = client.sample(types.ModelInput.from_ints([999]), 1, params)
        for future in futures:
            assert [s.tokens for s in future.result().sequences] == [s.tokens for s in expected.sequences]
        with pytest.raises(tinker.RequestFailedError, match="The prompt holds the token id 999"):
            bad.result()
        copy = tinker.SamplingClient.from_sampler_handle(client.get_sampler_handle(), api_key=API_KEY)
        assert copy.sample(PROMPT, 2, params).result().sequences[0].tokens == expected.sequences[0].tokens
        assert len(client.compute_logprobs(PROMPT).result()) == PROMPT.length


def test_seeds_hold_in_any_company(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    """Through the SDK: requests with seeds, alone, and amid many others of another adapter."""
    client = service.create_sampling_client(base_model="tiny").result()
    trained = trainer.save_weights_and_get_sampling_client().result()

    def sample(seed: int) -> tinker.APIFuture[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=24, stop=[], seed=seed, temperature=0.9)
        return client.sample(PROMPT, 2, params)

    alone = [[s.tokens for s in sample(seed).result().sequences] for seed in range(3)]
    noise = [trained.sample(PROMPT, 3, types.SamplingParams(max_tokens=5 + n, stop=[], top_k=3 + n)) for n in range(12)]
    amid = [[s.tokens for s in future.result().sequences] for future in [sample(seed) for seed in range(3)]]
    assert amid == alone
    for future in noise:
        future.result()

"""Concurrent sampling clients: fairness, cancellation, full queues, and sampling alongside training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from engine_process import API_KEY, running_engine
from sampling_jobs import make_job
from tinker import types

from engine.compute.base import BaseModel
from engine.compute.lora import LoraSpec
from engine.errors import RequestError
from engine.routes.app import make_app
from engine.sampling.job import SampleJob, SampleResult
from engine.service import sampling_queue
from engine.service.engine import Engine
from engine.service.sampling_queue import SamplingQueue
from engine.service.settings import Settings
from engine.service.worker import Worker

PROMPT = types.ModelInput.from_ints(list(b"to be or"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(models=("tiny",), state=tmp_path / "state", cache=tmp_path, max_waiting_samples=4)


def endless_work() -> Generator[None, None, None]:
    while True:
        yield


async def until_idle(queue: SamplingQueue) -> None:
    while queue.is_busy:
        await asyncio.sleep(0.001)


def test_long_queue_does_not_delay_other_clients(
    base: BaseModel, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch with room for two rows, the other client's row is one of the next two new rows."""
    monkeypatch.setattr(sampling_queue, "MAX_ROWS", 2)

    async def main() -> list[str]:
        queue, finished = SamplingQueue(base, Worker(), settings, base.num_bytes), []

        async def sample(client: str, seed: int) -> None:
            await queue.sample(client, make_job(seed, max_tokens=10), lambda: None)
            finished.append(client)

        many = [asyncio.create_task(sample("many", seed)) for seed in range(20)]
        await many[0]
        num_finished = len(finished)
        await asyncio.create_task(sample("one", 99))
        between = finished[num_finished:]
        await asyncio.gather(*many)
        return between

    between = asyncio.run(main())
    assert between[-1] == "one"
    assert len(between) <= 6


def test_training_and_sampling_take_turns(base: BaseModel, settings: Settings) -> None:
    """Each makes progress while the other one is unfinished."""

    async def main() -> tuple[int, bool]:
        worker = Worker()
        queue = SamplingQueue(base, worker, settings, base.num_bytes)
        sampling = asyncio.create_task(queue.sample("client", make_job(1, max_tokens=2000), lambda: None))
        pieces = 0
        while not sampling.done() and pieces < 10:
            await worker.run(lambda: base.hidden(make_job(2, length=64).prompt_T[None]), "model")
            pieces += 1
        trained_meanwhile = not sampling.done()
        more = asyncio.create_task(worker.run_generator(endless_work(), "model", lambda seconds: None))
        await queue.sample("other", make_job(3, max_tokens=2), lambda: None)
        sampled_meanwhile = not more.done()
        sampling.cancel()
        more.cancel()
        return pieces, trained_meanwhile and sampled_meanwhile

    pieces, both = asyncio.run(main())
    assert pieces == 10
    assert both


def test_cancelled_work_stops(base: BaseModel, settings: Settings) -> None:
    async def main() -> int:
        queue = SamplingQueue(base, Worker(), settings, base.num_bytes)
        endless = [asyncio.create_task(queue.sample("a", make_job(n, max_tokens=4000), lambda: None)) for n in range(3)]
        remaining = asyncio.create_task(queue.sample("b", make_job(9, max_tokens=40), lambda: None))
        await queue.sample("c", make_job(8, max_tokens=5), lambda: None)
        for task in endless:
            task.cancel()
        result = await remaining
        await until_idle(queue)
        return len(result.sequences[0].tokens)

    assert asyncio.run(main()) == 40


@pytest.mark.parametrize("deterministic", [False, True])
def test_group_computes_its_prompt_once(base: BaseModel, settings: Settings, deterministic: bool) -> None:
    """A prompt of 300 tokens is computed once for 40 samples, although 40 prompts exceed the limit of one prefill."""
    job = make_job(1, length=300, max_tokens=3, num_samples=40)
    settings = replace(settings, deterministic=deterministic)
    computed: list[int] = []

    def record(module: object, args: object, kwargs: dict[str, Any]) -> None:
        if (shape := kwargs["input_ids"].shape)[1] > 1:
            computed.append(shape.numel())

    def run(queue: SamplingQueue, job: SampleJob) -> SampleResult:
        return asyncio.run(queue.sample("a", job, lambda: None))

    queue = SamplingQueue(base, Worker(), settings, base.num_bytes)
    hook = base.decoder.register_forward_pre_hook(record, with_kwargs=True)
    group = run(queue, job)
    hook.remove()
    assert computed == [300]
    assert (queue.prefill_tokens_requested, queue.prefill_tokens_computed) == (40 * 300, 300)
    for index in (0, 39):
        alone = run(
            SamplingQueue(base, Worker(), settings, base.num_bytes), replace(job, num_samples=1, seed=job.seed + index)
        )
        assert group.sequences[index].tokens == alone.sequences[0].tokens


def test_failure_affects_only_its_request(base: BaseModel, settings: Settings) -> None:
    def broken() -> None:
        raise RuntimeError("no such file")

    async def main() -> int:
        queue = SamplingQueue(base, Worker(), settings, base.num_bytes)
        good = asyncio.create_task(queue.sample("a", make_job(1, max_tokens=30), lambda: None))
        with pytest.raises(RuntimeError, match="no such file"):
            await queue.sample("b", make_job(2), broken)
        return len((await good).sequences[0].tokens)

    assert asyncio.run(main()) == 30


def test_weights_that_give_nan_fail_their_request(
    base: BaseModel, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its waiting rows are dropped, and the other requests in the batch have the same tokens as alone."""
    monkeypatch.setattr(sampling_queue, "MAX_ROWS", 3)
    diverged = base.new_adapter(LoraSpec(rank=1, seed=1))
    with torch.no_grad():
        for _, weight in diverged.named_parameters():
            weight.fill_(1e30)

    async def main() -> tuple[SampleResult, SampleResult]:
        queue = SamplingQueue(base, Worker(), settings, base.num_bytes)
        alone = await queue.sample("a", make_job(1, max_tokens=30), lambda: None)
        good = asyncio.create_task(queue.sample("a", make_job(1, max_tokens=30), lambda: None))
        with pytest.raises(RequestError, match="These weights give logits that are not finite: sample from earlier"):
            await queue.sample("b", make_job(2, num_samples=9), lambda: diverged)
        result = await good
        await until_idle(queue)
        return alone, result

    alone, result = asyncio.run(main())
    assert result.sequences[0].tokens == alone.sequences[0].tokens


@asynccontextmanager
async def served(base: BaseModel, settings: Settings) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """Run the engine's routes without a socket."""
    engine = Engine(settings, {"tiny": base}, Worker())
    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1", timeout=60) as http:
        yield engine, http
    engine.worker.stop()


def sample_request(sampler: str, seq_id: int, **params: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT.to_ints()}]},
        "sampling_params": {"stop": [], "max_tokens": 3000, **params},
    }


def test_rejected_request_can_be_sent_again(base: BaseModel, settings: Settings) -> None:
    """A rejected request can be sent again with its seq id, after accepted requests were cancelled."""

    async def main() -> None:
        async with served(base, settings) as (_, http):
            session = (await http.post("create_session", json={})).json()["session_id"]
            content = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            sampler = (await http.post("create_sampling_session", json=content)).json()["sampling_session_id"]
            responses = [await http.post("asample", json=sample_request(sampler, seq_id)) for seq_id in range(12)]
            accepted = [response.json()["request_id"] for response in responses if response.status_code == 200]
            rejected = [seq_id for seq_id, response in enumerate(responses) if response.status_code == 429]
            assert rejected
            assert len(accepted) + len(rejected) == 12
            assert "send this request again later" in responses[rejected[0]].json()["detail"]
            for request_id in accepted:
                assert (await http.post("cancel_future", json={"request_id": request_id})).status_code == 200
                failed = (await http.post("retrieve_future", json={"request_id": request_id})).json()
                assert failed == {"error": "The request was cancelled.", "category": "user"}
            again = await http.post("asample", json=sample_request(sampler, rejected[0], max_tokens=3))
            # The rejected request was not recorded, so its seq id can have other content.
            assert again.status_code == 200
            result = await http.post("retrieve_future", json={"request_id": again.json()["request_id"]})
            assert result.headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_end_of_session_stops_its_samples(base: BaseModel, settings: Settings) -> None:
    async def main() -> None:
        async with served(base, settings) as (engine, http):
            session = (await http.post("create_session", json={})).json()["session_id"]
            content = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            sampler = (await http.post("create_sampling_session", json=content)).json()["sampling_session_id"]
            queue = engine.sampler(sampler).queue
            assert (await http.post("asample", json=sample_request(sampler, 0))).status_code == 200
            await http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
            await until_idle(queue)

    asyncio.run(main())


def test_sdk_cancels_an_abandoned_sample(engine_url: str, service: tinker.ServiceClient) -> None:
    """The SDK cancels the sample on the engine, and its result says so."""
    client = service.create_sampling_client(base_model="tiny").result()
    future = client.sample(PROMPT, 8, types.SamplingParams(max_tokens=4000, stop=[]))
    quick = client.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=[]))
    sequence_id = quick.result().sequences[0].sequence_id
    future.future().cancel()
    sampler_id = sequence_id.rsplit(":", 2)[0]
    with httpx.Client(base_url=f"{engine_url}/api/v1", timeout=60) as http:
        responses = [http.post("retrieve_future", json={"request_id": f"{sampler_id}:{n}"}) for n in range(2)]
    assert "cancelled" in next(a.text for a in responses if a.headers["content-type"] == "application/json")


def test_retrieve_futures_waits_for_all_samples(tmp_path: Path, service: tinker.ServiceClient) -> None:
    """Tokens and failures are the same as without retrieve_futures, also for a copy of the client."""
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
        with pytest.raises(tinker.RequestFailedError, match="The prompt has the token id 999"):
            bad.result()
        copy = tinker.SamplingClient.from_sampler_handle(client.get_sampler_handle(), api_key=API_KEY)
        assert copy.sample(PROMPT, 2, params).result().sequences[0].tokens == expected.sequences[0].tokens
        assert len(client.compute_logprobs(PROMPT).result()) == PROMPT.length


def test_seeds_repeat_samples_among_other_requests(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient
) -> None:
    """Requests with seeds give the same tokens alone and among many requests of another adapter."""
    client = service.create_sampling_client(base_model="tiny").result()
    trained = trainer.save_weights_and_get_sampling_client().result()

    def sample(seed: int) -> tinker.APIFuture[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=24, stop=[], seed=seed, temperature=0.9)
        return client.sample(PROMPT, 2, params)

    alone = [[s.tokens for s in sample(seed).result().sequences] for seed in range(3)]
    noise = [trained.sample(PROMPT, 3, types.SamplingParams(max_tokens=5 + n, stop=[], top_k=3 + n)) for n in range(12)]
    concurrent = [[s.tokens for s in future.result().sequences] for future in [sample(seed) for seed in range(3)]]
    assert concurrent == alone
    for future in noise:
        future.result()

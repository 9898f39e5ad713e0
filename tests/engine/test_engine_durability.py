"""Recovery from kill -9: saved state is restored, lost state is reported, and clients continue."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import tinker
from engine_process import API_KEY, EngineProcess, running_engine
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from train_steps import ADAM, train

pytestmark = pytest.mark.process


def service_of(engine: EngineProcess) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=engine.url, api_key=API_KEY)


def saved_models_continue(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    """The same clients continue to train and sample, with the numbers of an uninterrupted run."""
    service = service_of(engine)
    trainer, twin, untouched = (
        service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result() for _ in range(3)
    )
    losses = train(twin, batch, 4)
    assert train(trainer, batch, 2) == losses[:2]
    sampler = service.create_sampling_client(trainer.save_weights_for_sampler("s").result().path).result()
    trainer.save_state("half").result()
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=8, seed=1)
    tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    yield
    assert train(trainer, batch, 2) == losses[2:]
    assert train(untouched, batch, 4) == losses
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == tokens
    with pytest.raises(tinker.RequestFailedError, match="it has no checkpoint: create a new training client") as error:
        twin.forward(batch, "cross_entropy").result()
    assert error.value.category == types.RequestErrorCategory.Server
    service.close("success").result()


def lost_training_is_reported(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    """Requests fail and name the last checkpoint, from which training repeats the same numbers."""
    service = service_of(engine)
    trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    train(trainer, batch, 2)
    saved = trainer.save_state("two").result().path
    assert saved is not None
    losses = train(trainer, batch, 2)
    yield
    step = trainer.optim_step(ADAM)
    for future in (step, trainer.forward_backward(batch, "cross_entropy"), trainer.save_state("three")):
        with pytest.raises(tinker.RequestFailedError, match=f"its last checkpoint is {saved}: create"):
            future.result()
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    assert train(again, batch, 2) == losses
    trainer.load_state_with_optimizer(saved).result()
    assert train(trainer, batch, 2) == losses
    service.close("success").result()


def checkpoint_excludes_accumulated_gradient(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    service = service_of(engine)
    trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    trainer.forward_backward(batch, "cross_entropy").result()
    trainer.save_state("between").result()
    yield
    with pytest.raises(tinker.RequestFailedError, match=r"is lost; its last checkpoint is .*/between"):
        trainer.optim_step(ADAM).result()
    service.close("success").result()


def responses_and_seq_ids_survive(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    """An unfetched save, a repeat and a request behind a gap survive, even with a torn last journal record."""
    http = httpx.Client(base_url=f"{engine.url}/api/v1", timeout=60)
    session = http.post("create_session", json={}).json()["session_id"]
    content = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 1}}
    model = http.post("create_model", json=content).json()["model_id"]
    save = {"model_id": model, "seq_id": 1, "path": "a", "overwrite": False}
    request_id = http.post("save_weights", json=save).json()["request_id"]
    http.post("save_weights", json={**save, "seq_id": 3, "path": "b"})
    while http.get(f"{engine.url}/runs/{model}/requests/{request_id}/status").json()["status"] != "finished":
        time.sleep(0.01)
    with (engine.state / "sessions" / f"{session}.jsonl").open("ab") as file:
        file.write(b'{"type":"requ')
    yield
    response = http.post("retrieve_future", json={"request_id": request_id})
    assert response.json()["path"] == f"tinker://{model}/weights/a"
    assert http.post("save_weights", json=save).json()["request_id"] == request_id
    lost = http.post("retrieve_future", json={"request_id": f"{model}:3"})
    assert "restarted before this request" in lost.json()["error"]
    for seq_id, name in ((2, "c"), (4, "d")):
        sent = http.post("save_weights", json={**save, "seq_id": seq_id, "path": name}).json()["request_id"]
        assert http.post("retrieve_future", json={"request_id": sent}).json()["path"].endswith(name)
    assert http.get(f"sessions/{session}").json()["training_run_ids"] == [model]
    http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})


def saved_pass_must_not_be_repeated(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    """The error of an unfetched pass tells the client not to send it again, because it would train twice."""
    with httpx.Client(base_url=f"{engine.url}/api/v1", timeout=60) as http:
        service = service_of(engine)
        trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
        model = trainer.model_id
        request = types.ForwardBackwardRequest(types.ForwardBackwardInput(batch, "cross_entropy"), model, 1)
        body = forward_backward_request_to_proto(request).SerializeToString()
        http.post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})
        http.post("optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}})
        saved = http.post("save_weights", json={"model_id": model, "seq_id": 3, "path": "a"}).json()["request_id"]
        assert http.post("retrieve_future", json={"request_id": saved}).json()["path"].endswith("a")
        yield
        response = http.post("retrieve_future", json={"request_id": f"{model}:1"}).json()
        assert "its effect on the model is saved: do not send it again" in response["error"]
        assert http.post("retrieve_future", json={"request_id": f"{model}:2"}).json() == {"metrics": {}}
        service.close("success").result()


def running_sample_is_requested_again(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    service = service_of(engine)
    sampler = service.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=200, stop=[])
    waiting = [sampler.sample(types.ModelInput.from_ints([1]), 8, params) for _ in range(3)]
    sampler.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()
    assert not waiting[-1].future().done()
    yield
    assert all(len(sequence.tokens) == 200 for sample in waiting for sequence in sample.result().sequences)
    service.close("success").result()


def sampler_of_replaced_weights_is_lost(engine: EngineProcess, batch: list[types.Datum]) -> Iterator[None]:
    """It must not sample from the weights that replaced its own; a journal of release 0.1 names no weights."""
    service = service_of(engine)
    trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    path = trainer.save_weights_for_sampler("s").result().path
    replaced = service.create_sampling_client(path).result()
    train(trainer, batch, 1)
    trainer.save_weights_for_sampler("s").result()
    current = service.create_sampling_client(path).result()
    with (engine.state / "sessions" / f"{service.holder.get_session_id()}.jsonl").open("a") as file:
        old = f"{service.holder.get_session_id()}:sample:99"
        file.write(json.dumps({"type": "sampler", "sampler": old, "base": "tiny", "path": path}) + "\n")
    prompt = types.ModelInput.from_ints([1, 2, 3])
    before = current.compute_logprobs(prompt).result()
    yield
    assert current.compute_logprobs(prompt).result() == before
    assert httpx.get(f"{engine.url}/api/v1/samplers/{old}").json()["model_path"] == path
    with pytest.raises(tinker.NotFoundError, match="create a new sampling client"):
        replaced.compute_logprobs(prompt).result()
    service.close("success").result()


SCENARIOS = (
    saved_models_continue,
    sampler_of_replaced_weights_is_lost,
    lost_training_is_reported,
    checkpoint_excludes_accumulated_gradient,
    responses_and_seq_ids_survive,
    saved_pass_must_not_be_repeated,
    running_sample_is_requested_again,
)
Scenarios = dict[Callable[..., Iterator[None]], Iterator[None]]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, batch: list[types.Datum]) -> Iterator[Scenarios]:
    """Run all scenarios up to their yield, kill the engine, and restart it on the same state and port."""
    folder = tmp_path_factory.mktemp("killed")
    with running_engine(folder) as engine:
        scenarios = {scenario: scenario(engine, batch) for scenario in SCENARIOS}
        for first_half in scenarios.values():
            next(first_half)
        engine.process.kill()
        engine.process.wait()
        with running_engine(folder, arguments=["--port", str(urlsplit(engine.url).port)]):
            yield scenarios


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_continues_after_a_kill(started: Scenarios, scenario: Callable[..., Iterator[None]]) -> None:
    assert next(started[scenario], "ended") == "ended"


def load_all_checkpoints(engine: EngineProcess) -> set[str]:
    """Load every listed checkpoint; return their paths."""
    rest = tinker.RestClient(base_url=engine.url, api_key=API_KEY)
    listed = {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints}
    with service_of(engine) as service:
        for path in listed:
            service.create_training_client_from_state_with_optimizer(path).result()
    return listed


def save_until_killed(engine: EngineProcess, http: httpx.Client, model_id: str) -> Iterator[str]:
    """Save under five names repeatedly; yield the acknowledged paths."""
    for seq_id in range(3, 100_000):
        save = {"model_id": model_id, "seq_id": seq_id, "path": f"{seq_id % 5}", "overwrite": True}
        try:
            sent = http.post("save_weights", json=save).json()["request_id"]
            yield http.post("retrieve_future", json={"request_id": sent}).json()["path"]
        except httpx.TransportError:
            assert engine.process.wait() == -signal.SIGKILL
            return


@pytest.mark.parametrize("num_kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_kills_leave_no_partial_checkpoint(tmp_path: Path, batch: list[types.Datum], num_kills: int) -> None:
    """After kills at random moments of consecutive saves, all acknowledged checkpoints are listed and load."""
    chance = random.Random(num_kills)
    saved: set[str] = set()
    for kill in range(num_kills + 1):
        with running_engine(tmp_path / "engine") as engine, httpx.Client(timeout=60) as http:
            assert saved <= load_all_checkpoints(engine)
            if kill < num_kills:
                service = service_of(engine)
                trainer = service.create_lora_training_client(base_model="tiny", rank=64, seed=kill).result()
                train(trainer, batch, 1)
                http.base_url = f"{engine.url}/api/v1"
                threading.Timer(0.05 + 0.3 * chance.random(), engine.process.kill).start()
                saved.update(save_until_killed(engine, http, trainer.model_id))
                service.holder.close()
    assert len(saved) >= num_kills

"""What arrives twice, out of order, or wrong: raw HTTP where the SDK would never send it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from engine_process import API_KEY, EngineProcess
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Wire:
    """A client that sends what it is told."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.session = self.post("create_session", {})["session_id"]

    def post(self, route: str, content: dict[str, Any]) -> dict[str, Any]:
        return self.http.post(route, json=content).json()

    def create(self, **changes: Any) -> dict[str, Any]:
        content = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        return self.post("create_model", {**content, **changes})

    def forward_backward(
        self, model_id: str, seq_id: int, data: list[types.Datum], loss_fn: types.LossFnType = "cross_entropy"
    ) -> str:
        request = types.ForwardBackwardRequest(types.ForwardBackwardInput(data, loss_fn), model_id, seq_id)
        body = forward_backward_request_to_proto(request).SerializeToString()
        return self.http.post("forward_backward", content=body, headers=PROTOBUF).json()["request_id"]

    def optim_step(self, model_id: str, seq_id: int, learning_rate: float = 1e-2) -> str:
        content = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": learning_rate}}
        return self.post("optim_step", content)["request_id"]

    def result(self, request_id: str) -> httpx.Response:
        return self.http.post("retrieve_future", json={"request_id": request_id})

    def loss(self, request_id: str) -> float:
        return deserialize_forward_backward_output(self.result(request_id).content).metrics["loss:sum"]


@pytest.fixture
def wire(engine_url: str) -> Iterator[Wire]:
    with httpx.Client(base_url=f"{engine_url}/api/v1", timeout=60) as http:
        client = Wire(http)
        yield client
        client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})


@pytest.fixture
def model_id(wire: Wire) -> str:
    return wire.create()["model_id"]


def test_a_repeated_request_runs_once(wire: Wire, model_id: str, batch: list[types.Datum]) -> None:
    """Everything sent three times gives the losses of everything sent once."""
    twin = wire.create(model_seq_id=1, lora_config={"rank": 4, "seed": 7})["model_id"]
    other = wire.create(model_seq_id=2, lora_config={"rank": 4, "seed": 7})["model_id"]
    losses: dict[str, list[float]] = {twin: [], other: []}
    for model, times in ((twin, 1), (other, 3)):
        for step in range(3):
            requests = [wire.forward_backward(model, 2 * step + 1, batch) for _ in range(times)]
            steps = [wire.optim_step(model, 2 * step + 2) for _ in range(times)]
            assert len(set(requests)) == len(set(steps)) == 1
            losses[model].append(wire.loss(requests[0]))
            assert wire.result(steps[0]).json() == {"metrics": {}}
    assert losses[twin] == losses[other]
    assert model_id == wire.create()["model_id"]


def test_another_request_under_the_same_number_fails(wire: Wire, model_id: str, batch: list[types.Datum]) -> None:
    first = wire.forward_backward(model_id, 1, batch)
    second = wire.forward_backward(model_id, 1, batch[:1])
    assert "already sent with other content" in wire.result(second).json()["error"]
    assert wire.loss(first) > 0


def test_requests_run_in_the_order_of_their_numbers(wire: Wire, model_id: str, batch: list[types.Datum]) -> None:
    last = wire.forward_backward(model_id, 3, batch)
    step = wire.optim_step(model_id, 2, learning_rate=1e-2)
    first = wire.forward_backward(model_id, 1, batch)
    assert wire.loss(last) < wire.loss(first)
    assert wire.result(step).json() == {"metrics": {}}


def test_a_result_can_be_fetched_again(wire: Wire, model_id: str, batch: list[types.Datum]) -> None:
    request = wire.forward_backward(model_id, 1, batch)
    assert wire.result(request).content == wire.result(request).content


def broken(tokens: list[int], targets: np.ndarray, weights: np.ndarray) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": weights})  # pyright: ignore[reportArgumentType]


ONES = np.ones(3, np.float32)
IDS = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (broken([1, 2, 999], IDS, ONES), "model_input of datum 1 holds the token id 999"),
        (broken([1, 2, 3], np.array([1, -2, 3]), ONES), "target_tokens of datum 1 holds the token id -2"),
        (broken([1, 2, 3, 4], IDS, ONES), "Datum 1 has 4 input tokens and target_tokens of shape (3,)"),
        (broken([1, 2, 3], IDS, ONES[:2]), "weights of datum 1 has the shape (2,), but target_tokens have (3,)"),
        (broken([1, 2, 3], IDS, ONES * np.nan), "weights of datum 1 has a number that is not finite"),
        (broken([], IDS[:0], ONES[:0]), "Datum 1 has no tokens"),
        (broken([7] * 4097, np.full(4097, 7), np.ones(4097, np.float32)), "the model's context is 4096"),
        (types.Datum(types.ModelInput.from_ints([1])), "Datum 1 has no target_tokens"),
    ],
)
def test_a_bad_datum_is_named_and_the_client_goes_on(
    trainer: tinker.TrainingClient, batch: list[types.Datum], bad: types.Datum, sentence: str
) -> None:
    before = trainer.forward(batch, "cross_entropy").result().metrics["loss:sum"]
    failing = trainer.forward_backward([batch[0], bad], "cross_entropy")
    step = trainer.optim_step(types.AdamParams())
    with pytest.raises(tinker.RequestFailedError) as error:
        failing.result()
    assert sentence in str(error.value)
    assert error.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match=r"its gradient was dropped and no step was taken"):
        step.result()
    assert trainer.forward_backward(batch, "cross_entropy").result().metrics["loss:sum"] == before
    trainer.optim_step(types.AdamParams()).result()


def test_what_is_not_offered_is_named(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    datum = broken([1, 2, 3], IDS, ONES)
    with pytest.raises(
        tinker.RequestFailedError, match=r"The loss 'grpo' is unknown: it is one of cross_entropy, .*ppo"
    ):
        trainer.forward_backward([datum], "grpo").result()  # pyright: ignore[reportArgumentType]
    with pytest.raises(tinker.RequestFailedError, match=r"does not serve the model .gpt-7.; it serves tiny"):
        service.create_lora_training_client(base_model="gpt-7").result()
    with pytest.raises(tinker.RequestFailedError, match="The LoRA rank is 0"):
        service.create_lora_training_client(base_model="tiny", rank=0).result()
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        service.create_lora_training_client(base_model="tiny", optimizer=types.DimuonOptimizerConfig()).result()


@pytest.mark.parametrize("change", [{"learning_rate": -1.0}, {"beta1": 1.0}, {"eps": -1e-9}])
def test_a_bad_optimizer_parameter_is_named(trainer: tinker.TrainingClient, change: dict[str, float]) -> None:
    with pytest.raises(tinker.RequestFailedError, match=f"{next(iter(change))} of the optimizer is"):
        trainer.optim_step(types.AdamParams(**change)).result()


def test_what_is_gone_says_so(wire: Wire, model_id: str) -> None:
    wire.post(f"sessions/{wire.session}/finish", {"reason": {"type": "success"}})
    answer = wire.http.post("optim_step", json={"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert answer.status_code == 404
    assert "create a training client from the last checkpoint" in answer.json()["detail"]
    assert wire.http.post("session_heartbeat", json={"session_id": wire.session}).status_code == 410
    assert wire.result(f"{model_id}:1").status_code == 404
    assert wire.http.post("create_sampling_session", json={"session_id": "x", "sampling_session_seq_id": 0}).is_error


def test_garbage_is_refused_without_a_server_error(wire: Wire) -> None:
    bodies = [b"", b"{", b"[]", b'{"model_id": 3}', uuid.uuid4().bytes * 100]
    routes = [
        "forward_backward",
        "optim_step",
        "create_model",
        "load_weights",
        "save_weights",
        "asample",
        "retrieve_future",
    ]
    for route in routes:
        for body in bodies:
            assert wire.http.post(route, content=body).status_code in (404, 422), (route, body)


def test_too_many_samples_are_refused_before_they_are_named(wire: Wire) -> None:
    """Each sample has an id in the answer; billions of them would fill the memory."""
    sampler = wire.post(
        "create_sampling_session", {"session_id": wire.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )["sampling_session_id"]
    content = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2**31,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    answer = wire.http.post("asample", json=content)
    assert answer.status_code == 422
    assert "num_samples is 2147483648" in answer.json()["detail"]


def test_a_compressed_request_is_read_and_a_bomb_is_not(wire: Wire, model_id: str, batch: list[types.Datum]) -> None:
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput(batch, "cross_entropy"), model_id, 1)
    body = forward_backward_request_to_proto(request).SerializeToString()
    headers = {**PROTOBUF, "Content-Encoding": "zstd"}
    compressor = zstandard.ZstdCompressor()
    answer = wire.http.post("forward_backward", content=compressor.compress(body), headers=headers)
    assert wire.loss(answer.json()["request_id"]) > 0
    bomb = compressor.compress(bytes(2**29))
    refused = wire.http.post("forward_backward", content=bomb, headers=headers)
    assert refused.status_code == 422
    assert "longer than" in refused.json()["detail"]
    assert wire.http.post("forward_backward", content=b"no zstd", headers=headers).status_code == 422


def test_a_web_page_is_refused(engine: EngineProcess) -> None:
    headers = {"Origin": "https://example.org", "X-API-Key": API_KEY}
    assert httpx.post(f"{engine.url}/api/v1/create_session", json={}, headers=headers).status_code == 403

"""Repeated, out-of-order and invalid requests, sent as raw HTTP, because the SDK never sends them."""

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


class RawClient:
    """HTTP client without the SDK's checks."""

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
def raw(engine_url: str) -> Iterator[RawClient]:
    with httpx.Client(base_url=f"{engine_url}/api/v1", timeout=60) as http:
        client = RawClient(http)
        yield client
        client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})


@pytest.fixture
def model_id(raw: RawClient) -> str:
    return raw.create()["model_id"]


def test_repeated_request_runs_once(raw: RawClient, model_id: str, batch: list[types.Datum]) -> None:
    """Sending every request three times gives the same losses as sending it once."""
    twin = raw.create(model_seq_id=1, lora_config={"rank": 4, "seed": 7})["model_id"]
    other = raw.create(model_seq_id=2, lora_config={"rank": 4, "seed": 7})["model_id"]
    losses: dict[str, list[float]] = {twin: [], other: []}
    for model, times in ((twin, 1), (other, 3)):
        for step in range(3):
            requests = [raw.forward_backward(model, 2 * step + 1, batch) for _ in range(times)]
            steps = [raw.optim_step(model, 2 * step + 2) for _ in range(times)]
            assert len(set(requests)) == len(set(steps)) == 1
            losses[model].append(raw.loss(requests[0]))
            assert raw.result(steps[0]).json() == {"metrics": {}}
    assert losses[twin] == losses[other]
    assert model_id == raw.create()["model_id"]


def test_different_request_with_the_same_seq_id_fails(raw: RawClient, model_id: str, batch: list[types.Datum]) -> None:
    first = raw.forward_backward(model_id, 1, batch)
    second = raw.forward_backward(model_id, 1, batch[:1])
    assert "already sent with other content" in raw.result(second).json()["error"]
    assert raw.loss(first) > 0


def test_requests_run_in_seq_order(raw: RawClient, model_id: str, batch: list[types.Datum]) -> None:
    last = raw.forward_backward(model_id, 3, batch)
    step = raw.optim_step(model_id, 2, learning_rate=1e-2)
    first = raw.forward_backward(model_id, 1, batch)
    assert raw.loss(last) < raw.loss(first)
    assert raw.result(step).json() == {"metrics": {}}


def test_result_can_be_fetched_again(raw: RawClient, model_id: str, batch: list[types.Datum]) -> None:
    request = raw.forward_backward(model_id, 1, batch)
    assert raw.result(request).content == raw.result(request).content


def make_datum(tokens: list[int], targets: np.ndarray, weights: np.ndarray) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": weights})  # pyright: ignore[reportArgumentType]


ONES = np.ones(3, np.float32)
IDS = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (make_datum([1, 2, 999], IDS, ONES), "model_input of datum 1 has the token id 999"),
        (make_datum([1, 2, 3], np.array([1, -2, 3]), ONES), "target_tokens of datum 1 has the token id -2"),
        (make_datum([1, 2, 3, 4], IDS, ONES), "Datum 1 has 4 input tokens and target_tokens of shape (3,)"),
        (make_datum([1, 2, 3], IDS, ONES[:2]), "weights of datum 1 has the shape (2,), but target_tokens has (3,)"),
        (make_datum([1, 2, 3], IDS, ONES * np.nan), "weights of datum 1 contains a value that is not finite"),
        (make_datum([], IDS[:0], ONES[:0]), "Datum 1 has no tokens"),
        (make_datum([7] * 4097, np.full(4097, 7), np.ones(4097, np.float32)), "the model's context is 4096"),
        (types.Datum(types.ModelInput.from_ints([1])), "Datum 1 has no target_tokens"),
    ],
)
def test_error_names_the_bad_datum_and_client_continues(
    trainer: tinker.TrainingClient, batch: list[types.Datum], bad: types.Datum, message: str
) -> None:
    before = trainer.forward(batch, "cross_entropy").result().metrics["loss:sum"]
    failing = trainer.forward_backward([batch[0], bad], "cross_entropy")
    step = trainer.optim_step(types.AdamParams())
    with pytest.raises(tinker.RequestFailedError) as error:
        failing.result()
    assert message in str(error.value)
    assert error.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match=r"its gradient was dropped and no step was taken"):
        step.result()
    assert trainer.forward_backward(batch, "cross_entropy").result().metrics["loss:sum"] == before
    trainer.optim_step(types.AdamParams()).result()


def test_error_names_unsupported_options(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    datum = make_datum([1, 2, 3], IDS, ONES)
    with pytest.raises(tinker.RequestFailedError, match=r"The loss 'grpo' is unknown; use one of cross_entropy, .*ppo"):
        trainer.forward_backward([datum], "grpo").result()  # pyright: ignore[reportArgumentType]
    with pytest.raises(tinker.RequestFailedError, match=r"does not serve the model .gpt-7.; it serves tiny"):
        service.create_lora_training_client(base_model="gpt-7").result()
    with pytest.raises(tinker.RequestFailedError, match="The LoRA rank is 0"):
        service.create_lora_training_client(base_model="tiny", rank=0).result()
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        service.create_lora_training_client(base_model="tiny", optimizer=types.DimuonOptimizerConfig()).result()


@pytest.mark.parametrize(
    "change", [{"learning_rate": -1.0}, {"beta1": 1.0}, {"eps": -1e-9}, {"eps": 0.0}, {"eps": 1e-40}]
)
def test_error_names_the_bad_optimizer_parameter(trainer: tinker.TrainingClient, change: dict[str, float]) -> None:
    with pytest.raises(tinker.RequestFailedError, match=f"{next(iter(change))} of the optimizer is"):
        trainer.optim_step(types.AdamParams(**change)).result()


def test_requests_after_the_end_of_a_session_fail(raw: RawClient, model_id: str) -> None:
    raw.post(f"sessions/{raw.session}/finish", {"reason": {"type": "success"}})
    response = raw.http.post("optim_step", json={"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert response.status_code == 404
    assert "create a training client from the last checkpoint" in response.json()["detail"]
    assert raw.http.post("session_heartbeat", json={"session_id": raw.session}).status_code == 410
    assert raw.result(f"{model_id}:1").status_code == 404
    assert raw.http.post("create_sampling_session", json={"session_id": "x", "sampling_session_seq_id": 0}).is_error


def test_malformed_bodies_are_client_errors(raw: RawClient) -> None:
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
            assert raw.http.post(route, content=body).status_code in (404, 422), (route, body)


def test_too_many_samples_are_rejected_before_ids_are_made(raw: RawClient) -> None:
    """The response has an id per sample, and billions of ids would fill the memory."""
    sampler = raw.post(
        "create_sampling_session", {"session_id": raw.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )["sampling_session_id"]
    content = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2**31,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    response = raw.http.post("asample", json=content)
    assert response.status_code == 422
    assert "num_samples is 2147483648" in response.json()["detail"]


def test_compressed_request_is_read_and_zip_bomb_is_rejected(
    raw: RawClient, model_id: str, batch: list[types.Datum]
) -> None:
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput(batch, "cross_entropy"), model_id, 1)
    body = forward_backward_request_to_proto(request).SerializeToString()
    headers = {**PROTOBUF, "Content-Encoding": "zstd"}
    compressor = zstandard.ZstdCompressor()
    response = raw.http.post("forward_backward", content=compressor.compress(body), headers=headers)
    assert raw.loss(response.json()["request_id"]) > 0
    bomb = compressor.compress(bytes(2**29))
    rejected = raw.http.post("forward_backward", content=bomb, headers=headers)
    assert rejected.status_code == 422
    assert "longer than" in rejected.json()["detail"]
    assert raw.http.post("forward_backward", content=b"no zstd", headers=headers).status_code == 422


def test_request_from_a_web_page_is_rejected(engine: EngineProcess) -> None:
    headers = {"Origin": "https://example.org", "X-API-Key": API_KEY}
    assert httpx.post(f"{engine.url}/api/v1/create_session", json={}, headers=headers).status_code == 403

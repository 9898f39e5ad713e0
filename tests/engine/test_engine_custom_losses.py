"""Custom losses over HTTP: repeats, sessions, restarts, rejected losses and losses that fail at run time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker
import torch
from engine_process import API_KEY, EngineProcess
from tinker import types


def negative(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/tokens:mean": (weights * 0 + 1).sum()}


GRAPH: dict[str, Any] = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "neg", "target": "neg", "args": [{"ref": "logprobs"}]},
        {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "neg"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
    ],
}


@pytest.fixture
def http(engine_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{engine_url}/api/v1", headers={"X-API-Key": API_KEY}, timeout=60) as client:
        yield client


def create(http: httpx.Client, session: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    content = {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": "nll",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": GRAPH,
        "type": "create_custom_loss",
        **changes,
    }
    response = http.post("create_custom_loss", json=content)
    assert response.status_code == 200, response.text
    return http.post("retrieve_future", json={"request_id": response.json()["request_id"]}).json()


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    session = http.post("create_session", json={}).json()["session_id"]
    yield session
    http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})


def test_repeat_returns_same_loss_and_conflict_is_rejected(http: httpx.Client, session: str) -> None:
    responses = [create(http, session) for _ in range(3)]
    assert [response["loss_id"] for response in responses] == [f"{session}:loss:0"] * 3
    other = copy.deepcopy(GRAPH)
    other["nodes"][1]["target"] = "exp"
    rejected = create(http, session, graph=other)
    assert "was already created with other content" in rejected["error"]
    assert rejected["category"] == "user"
    assert create(http, session, number=1, graph=other)["loss_id"] == f"{session}:loss:1"
    assert create(http, session)["loss_id"] == f"{session}:loss:0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": {**GRAPH, "format": 2}}, "graph.format"),
        ({"graph": {**GRAPH, "nodes": GRAPH["nodes"][:-1]}}, "must end with an output"),
        ({"graph": {**GRAPH, "nodes": [{"op": "eval", "name": "x", "target": "1"}]}}, "graph.nodes.0.op"),
        ({"inputs": [{"name": "logprobs", "rank": 7}]}, "inputs.0.rank"),
        ({"inputs": []}, "declare 'logprobs' first"),
        ({"number": 1000}, "A session has at most 1000 custom losses"),
    ],
)
def test_invalid_loss_fails_its_result(http: httpx.Client, session: str, changes: Any, message: str) -> None:
    response = create(http, session, **changes)
    assert message in response["error"]
    assert response["category"] == "user"
    assert create(http, session)["loss_id"]


def test_malformed_and_oversized_bodies_are_client_errors(http: httpx.Client, session: str) -> None:
    for body in (b"", b"[]", b"{", b'{"session_id": "nobody"}', b"[" * 100_000, b'{"a": "' + b"x" * 2**23 + b'"}'):
        assert http.post("create_custom_loss", content=body).status_code in (404, 422)
    content = {"session_id": session, "custom_loss_seq_id": -1, "name": "a", "inputs": [], "graph": GRAPH}
    assert http.post("create_custom_loss", json=content).status_code == 422


def test_loss_belongs_to_its_session(engine_url: str, batch: list[types.Datum], trainer: tinker.TrainingClient) -> None:
    with tinker.ServiceClient(base_url=engine_url, api_key=API_KEY) as other:
        handle = other.create_custom_loss(negative, {"logprobs": 1, "weights": 1}).result()
        assert handle.loss_id is not None
        with pytest.raises(
            tinker.RequestFailedError, match=r"has no custom loss .* on the service client that created this"
        ):
            trainer.forward(batch, "custom", {"loss_id": handle.loss_id}).result()


def test_metrics_combine_over_chunks(service: tinker.ServiceClient, batch: list[types.Datum]) -> None:
    flags = service.holder._client_config
    service.holder._client_config = flags.model_copy(update={"fwdbwd_max_chunk_len": 2})
    trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    handle = service.create_custom_loss(negative, {"logprobs": 1, "weights": 1}).result()
    metrics = trainer.forward_backward_custom(batch, handle).result().metrics
    expected = trainer.forward(batch, "cross_entropy").result().metrics["loss:sum"]
    lengths = [datum.model_input.length for datum in batch]
    assert metrics == {
        "loss:sum": pytest.approx(expected, rel=1e-6),
        "custom/nll:sum": pytest.approx(expected, rel=1e-6),
        "custom/tokens:mean": pytest.approx(sum(lengths) / len(lengths)),
    }


def test_several_and_sparse_targets_per_token(service: tinker.ServiceClient) -> None:
    """Dense and sparse inputs of rank 2 give the loss and the gradient of cross_entropy."""

    def wide(logprobs, weights):
        return -(logprobs * weights).sum(), {}

    generator = torch.Generator().manual_seed(0)
    sparse = torch.zeros(6, 9, dtype=torch.int64)
    sparse[2, 4] = 65
    targets = [torch.randint(1, 256, (5, 3), generator=generator), sparse]
    weights = [torch.rand(5, 3, generator=generator), (sparse > 0).float()]
    data = [
        types.Datum(types.ModelInput.from_ints([7] * len(target)), {"target_tokens": target, "weights": weight})  # pyright: ignore[reportArgumentType]
        for target, weight in zip(targets, weights, strict=True)
    ]
    assert data[1].loss_fn_inputs["weights"].sparse_crow_indices is not None
    handle = service.create_custom_loss(wide, {"logprobs": 2, "weights": 2}).result()
    results = []
    for name, config in (("cross_entropy", None), ("custom", {"loss_id": handle.loss_id})):
        trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        loss = trainer.forward_backward(data, name, config).result().metrics["loss:sum"]  # pyright: ignore[reportArgumentType]
        trainer.optim_step(types.AdamParams(learning_rate=1.0, eps=100.0, beta1=0.0, beta2=0.0)).result()
        outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
        results.append((loss, [output["logprobs"].to_torch() for output in outputs]))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-6, atol=2e-5)


def nan(logprobs):
    return (logprobs * float("nan")).sum(), {}


def nan_gradient(logprobs):
    return (logprobs * 0).sqrt().sum(), {}


def constant(logprobs):
    return (logprobs.detach() * 2).sum(), {}


def vector(logprobs):
    return logprobs * 2, {}


def overwritten(logprobs):
    x = logprobs.exp()
    x.add_(1.0)
    return x.sum(), {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nan, "The loss is nan: check its inputs"),
        (nan_gradient, "The gradient of the loss with respect to the logprobs is not finite"),
        (constant, "does not depend on the logprobs"),
        (vector, r"returned torch.float32 of shape \(\d+,\) as its loss, but a floating-point scalar"),
        (overwritten, "The loss has no gradient with respect to the logprobs: one of the variables needed"),
    ],
)
def test_failing_loss_gives_one_sentence_and_client_continues(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, batch: list[types.Datum], loss: Any, message: str
) -> None:
    handle = service.create_custom_loss(loss, {"logprobs": 1}).result()
    with pytest.raises(tinker.RequestFailedError, match=message) as error:
        trainer.forward_backward_custom(batch, handle).result()
    assert error.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="its gradient was dropped and no step was taken"):
        trainer.optim_step(types.AdamParams()).result()
    good = service.create_custom_loss(negative, {"logprobs": 1, "weights": 1}).result()
    assert trainer.forward_backward_custom(batch, good).result().metrics["loss:sum"] > 0
    trainer.optim_step(types.AdamParams()).result()


def test_unsupported_operation_fails_creation(service: tinker.ServiceClient) -> None:
    def random(logprobs):
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match=r"does not support the operation 'torch.rand_like'"):
        service.create_custom_loss(random, {"logprobs": 1}).result()


def test_losses_stay_on_disk_until_their_session_ends(engine: EngineProcess, http: httpx.Client, session: str) -> None:
    assert create(http, session)["loss_id"]
    folder = engine.state / "custom_losses" / session
    assert [path.name for path in folder.iterdir()] == ["0.json"]
    http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
    assert not folder.exists()

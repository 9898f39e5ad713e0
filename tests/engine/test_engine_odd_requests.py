"""Odd and heavy requests of one client: rejected in one sentence, and without effect on other clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from engine.compute.base import BaseModel
from engine.errors import RequestError
from engine.routes.app import make_app
from engine.routes.body import MAX_JSON_VALUES
from engine.service.engine import Engine
from engine.service.settings import Settings
from engine.service.worker import Worker
from engine.wire.forward_backward import MAX_PARTS, MAX_SPARSE_ELEMENTS, decode_data, decode_request

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def with_engine(base: BaseModel, folder: Path, use: Callable[[httpx.AsyncClient, Engine], Awaitable[None]]) -> None:
    """Run ``use`` with a client of an engine in this process."""

    async def main() -> None:
        engine = Engine(Settings(("tiny",), folder, folder), {"tiny": base}, Worker())
        transport = httpx.ASGITransport(make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1", timeout=60) as http:
            await use(http, engine)
        engine.stop()

    asyncio.run(main())


async def open_session(http: httpx.AsyncClient, **content: Any) -> str:
    response = await http.post("create_session", json=content)
    assert response.status_code == 200, response.text
    return response.json()["session_id"]


async def result(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    return (await http.post("retrieve_future", json={"request_id": request_id})).json()


async def check_records(http: httpx.AsyncClient, session: str) -> None:
    """Check that all lists of records and a new session work for another client."""
    for path in ("sessions", "training_runs", "checkpoints", f"sessions/{session}"):
        response = await http.get(path)
        assert response.status_code == 200, (path, response.text)
    response = await http.post("sessions/search", json={"limit": 100, "owner": {"type": "own"}})
    assert response.status_code == 200, response.text
    assert session in [summary["session_id"] for summary in response.json()["sessions"]]
    await open_session(http)


@pytest.mark.parametrize(
    ("route", "content"),
    [
        ("create_session", {"user_metadata": {"a": "\ud800"}}),
        ("create_session", {"user_metadata": {"\udfff": "a"}}),
        ("create_session", {"display_name": "a\udc00\ud800"}),
        ("create_model", {"user_metadata": {"a": "\ud800"}}),
        ("save_weights", {"path": "a", "user_metadata": {"a": "\ud800"}}),
        ("sessions/search", {"limit": 1, "owner": {"type": "own"}, "display_name": "\ud800"}),
    ],
)
def test_an_unpaired_surrogate_is_rejected_at_the_door(
    base: BaseModel, tmp_path: Path, route: str, content: dict[str, Any]
) -> None:
    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        session = await open_session(http, user_metadata={"pair": "\U0001f600"})
        response = await http.post(route, content=json.dumps({"session_id": session, **content}))
        assert response.status_code == 422
        assert "unpaired surrogate" in response.json()["detail"]
        raw = json.dumps({"display_name": "\ud800"}, ensure_ascii=False).encode(errors="surrogatepass")
        assert (await http.post("create_session", content=raw)).status_code == 422
        await check_records(http, session)

    with_engine(base, tmp_path, use)


BAD_NUMBERS = ["9" * 4000, str(2**64), str(-(2**63) - 1), "true", "-1", "1.0", '"1"', str(10**9), "null"]


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("create_model", "model_seq_id"),
        ("load_weights", "model_seq_id"),
        ("create_sampling_session", "sampling_session_seq_id"),
        ("create_custom_loss", "custom_loss_seq_id"),
    ],
)
def test_an_odd_number_is_rejected(base: BaseModel, tmp_path: Path, route: str, field: str) -> None:
    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        session = await open_session(http)
        content: dict[str, Any] = {"session_id": session, "base_model": "tiny"}
        if route != "create_sampling_session":
            content |= {"lora_config": {"rank": 2}, "path": "a"}
        for number in BAD_NUMBERS:
            body = json.dumps({**content, field: "@"}).replace('"@"', number)
            response = await http.post(route, content=body)
            assert response.status_code == 422, number
            assert field in response.text or "more than 64 bits" in response.text
        assert not engine.sessions[session].models
        await check_records(http, session)

    with_engine(base, tmp_path, use)


def test_booleans_and_texts_are_no_numbers(base: BaseModel, tmp_path: Path) -> None:
    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        session = await open_session(http)
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler_id = (await http.post("create_sampling_session", json=sampler)).json()["sampling_session_id"]
        request = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2},
        }
        for field, value in (("seq_id", True), ("num_samples", True), ("num_samples", "1"), ("seq_id", -1)):
            response = await http.post("asample", json={**request, field: value})
            assert response.status_code == 422
            assert field in response.json()["detail"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": True}}
        created = (await http.post("create_model", json=model)).json()
        assert "lora_config.rank" in (await result(http, created["request_id"]))["error"]

    with_engine(base, tmp_path, use)


def test_metadata_of_a_run_with_other_values_than_texts_is_rejected(base: BaseModel, tmp_path: Path) -> None:
    """A run with such metadata was written, and then missing from the list of training runs."""

    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        model = {"session_id": await open_session(http), "base_model": "tiny", "lora_config": {"rank": 2}}
        for number, metadata in enumerate(({"a": 1}, {"a": "b"})):
            content = {**model, "model_seq_id": number, "user_metadata": metadata}
            created = (await http.post("create_model", json=content)).json()
            assert ("error" in await result(http, created["request_id"])) == (number == 0)
        runs = (await http.get("training_runs")).json()["training_runs"]
        assert [run["user_metadata"] for run in runs] == [{"a": "b"}]

    with_engine(base, tmp_path, use)


def test_records_of_an_earlier_engine_do_not_break_requests(base: BaseModel, tmp_path: Path) -> None:
    """Journals with surrogates and with a model whose number is too long for a run's name."""

    async def write(http: httpx.AsyncClient, engine: Engine) -> None:
        for text, model in (("\ud800", None), ("a", f"x:train:{'9' * 4000}")):
            session = engine.open_session({"a": "b"}, None)
            session.journal.close()  # unlocks it, as the end of the process does
            journal = engine.session_store._journal_path(session.session_id)
            lines = journal.read_text().replace('"b"', json.dumps(text))
            if model:
                record = {"type": "request", "model": model, "seq": 0, "digest": "00", "changes": False}
                lines += json.dumps(record) + "\n"
            journal.write_text(lines)

    async def read(http: httpx.AsyncClient, engine: Engine) -> None:
        (restored,) = engine.sessions
        await check_records(http, restored)
        engine.sessions[restored].user_metadata["a"] = "\ud800"
        engine.sessions[restored].last_seen -= 3600
        await open_session(http)  # closes the idle session

    with_engine(base, tmp_path, write)
    with_engine(base, tmp_path, read)


def heavy_json() -> bytes:
    return b'{"session_id": [' + b"{}," * (MAX_JSON_VALUES // 16) + b"{}]}"


def heavy_string() -> bytes:
    """One value, with many starts of an integer that is almost too long."""
    return b'{"session_id": "' + (b"1" * 18 + b"a") * 2**21 + b'"}'


def heavy_protobuf() -> bytes:
    return bytes([pb.ForwardBackwardRequest.DATA_FIELD_NUMBER << 3 | 2, 0]) * (MAX_PARTS - 1)


@pytest.mark.parametrize(
    ("route", "body", "headers"),
    [
        ("create_model", heavy_json(), {}),
        ("session_heartbeat", heavy_string(), {}),
        ("session_heartbeat", zstandard.compress(heavy_string()), {"Content-Encoding": "zstd"}),
        ("create_model", zstandard.compress(heavy_json()), {"Content-Encoding": "zstd"}),
        ("forward_backward", heavy_protobuf(), PROTOBUF),
    ],
)
def test_a_health_check_is_answered_before_a_heavy_request(
    base: BaseModel, tmp_path: Path, route: str, body: bytes, headers: dict[str, str]
) -> None:
    order: list[str] = []

    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        async def heavy() -> None:
            response = await http.post(route, content=body, headers=headers)
            assert response.status_code in (404, 422)
            order.append("heavy")

        async def check() -> None:
            assert (await http.get("healthz")).status_code == 200
            order.append("healthz")

        await asyncio.gather(heavy(), check())

    with_engine(base, tmp_path, use)
    assert order == ["healthz", "heavy"]


def test_a_body_of_millions_of_values_is_rejected(base: BaseModel, tmp_path: Path) -> None:
    async def use(http: httpx.AsyncClient, engine: Engine) -> None:
        response = await http.post("create_session", content=b"[" + b"{}," * MAX_JSON_VALUES + b"{}]")
        assert f"more than {MAX_JSON_VALUES}: send less at once" in response.json()["detail"]

    with_engine(base, tmp_path, use)
    empty_datum = bytes([pb.ForwardBackwardRequest.DATA_FIELD_NUMBER << 3 | 2, 0])
    chunks = pb.Datum(model_input=[pb.Chunk()] * (MAX_PARTS + 1))
    for body in (empty_datum * (MAX_PARTS + 1), pb.ForwardBackwardRequest(data=[chunks]).SerializeToString()):
        with pytest.raises(RequestError, match="datums and parts of datums: send less at once"):
            decode_request(body)


def test_a_large_batch_is_decoded(batch: list[types.Datum]) -> None:
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput(batch * 10_000, "cross_entropy"), "m", 3)
    body = forward_backward_request_to_proto(request).SerializeToString()
    assert len(body) > 2 * MAX_PARTS
    decoded = decode_request(body)
    assert (len(decoded.data), decoded.seq_id, decoded.model_id) == (len(batch) * 10_000, 3, "m")
    with pytest.raises(RequestError, match="not a message"):
        decode_request(body[:-1])


def test_a_negative_seq_id_is_rejected_in_protobuf() -> None:
    with pytest.raises(RequestError, match="seq_id is -1"):
        decode_request(pb.ForwardBackwardRequest(seq_id=-1).SerializeToString())


def test_sparse_shapes_are_checked_before_they_are_expanded() -> None:
    """Each tensor alone is within the limit."""
    rows = np.zeros(2, np.int64).tobytes()
    weights = pb.Tensor(
        dtype=pb.DTYPE_FLOAT32, shape=[1, MAX_SPARSE_ELEMENTS // 2 + 1], sparse_csr=pb.SparseCsr(crow_indices=rows)
    )
    targets = pb.Tensor(dtype=pb.DTYPE_INT64, dense=np.zeros(1, np.int64).tobytes())
    datum = pb.Datum(loss_fn_inputs={"target_tokens": targets, "weights": weights})
    with pytest.raises(RequestError, match=f"have {MAX_SPARSE_ELEMENTS + 2} elements, more than"):
        decode_data([datum, datum], ["weights"])
    for shape in ([2**62, 2**62], [1] * 9):
        odd = pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, dense=targets.dense)
        with pytest.raises(RequestError, match="target_tokens of datum 0 has"):
            decode_data([pb.Datum(loss_fn_inputs={"target_tokens": odd})], [])

"""Fuzzing of all routes: no 5xx status, no hang, no traceback, and no effect on the results of another client."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from engine_process import running_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from engine.compute.base import BaseModel
from engine.routes.app import make_app
from engine.service.engine import Engine
from engine.service.settings import Settings
from engine.service.worker import Worker

PROTOBUF = {"Content-Type": "application/x-protobuf"}
LONG_POLLS = ("retrieve_future", "retrieve_futures")
GRAPH: dict[str, Any] = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "cumsum", "target": "cumsum", "args": [{"ref": "logprobs"}, 0]},
        {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": "cumsum"}, 2.0]},
        {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
    ],
}
FIELDS: dict[str, tuple[str, ...]] = {
    "create_session": ("user_metadata", "display_name"),
    "create_model": ("session_id", "model_seq_id", "base_model", "lora_config", "user_metadata"),
    "load_weights": ("model_id", "seq_id", "path", "optimizer"),
    "optim_step": ("model_id", "seq_id", "adam_params"),
    "save_weights": ("model_id", "seq_id", "path", "user_metadata"),
    "save_weights_external": ("model_id", "seq_id", "path"),
    "save_weights_for_sampler": ("model_id", "seq_id", "sampling_session_seq_id"),
    "create_sampling_session": ("session_id", "sampling_session_seq_id", "base_model"),
    "create_custom_loss": ("session_id", "custom_loss_seq_id", "name", "inputs", "graph"),
    "search": ("limit", "display_name", "owner"),
    "retrieve_futures": ("target", "timeout"),
    "asample": (
        "sampling_session_id", "seq_id", "num_samples", "prompt", "sampling_params", "target_prompt_logprobs",
    ),
}  # fmt: skip

known_bad = st.sampled_from(["\ud800", {"a": "\udfff"}, {"a": 1}, True, -1, 10**4000, 10**12])
hostile = known_bad | st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([2**31, 2**63, 2**63 - 1, -(2**63), 1e308, "x" * 100_000, "tiny", ":", "train:0"])
    | st.sampled_from(["../../etc/passwd", "tinker://x:train:0/weights/a", "tinker://../weights/a", "%00", "NaN"])
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=5), values, max_size=4),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A valid JSON value with up to three hostile parts."""
    content = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        parent = content
        while parent:
            key = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
            if not isinstance(parent[key], dict | list) or not parent[key] or draw(st.booleans()):
                parent[key] = copy.deepcopy(draw(hostile))
                break
            parent = parent[key]
    return content


def tensors() -> st.SearchStrategy[pb.Tensor]:
    int64 = st.integers(-(2**63), 2**63 - 1)
    arrays = st.binary(max_size=8).map(lambda data: data * 4) | st.just(bytes(range(1, 9)) * 8)
    csr = st.builds(pb.SparseCsr, values=arrays, crow_indices=arrays, col_indices=arrays)
    shapes = st.lists(st.integers(0, 4) | int64, max_size=3)
    dtypes = st.sampled_from([pb.DTYPE_FLOAT32, pb.DTYPE_INT64, pb.DTYPE_INT32, pb.DTYPE_BFLOAT16, 99])
    return st.builds(pb.Tensor, dtype=dtypes, shape=shapes, dense=arrays) | st.builds(
        pb.Tensor, dtype=dtypes, shape=shapes, sparse_csr=csr
    )


@st.composite
def protobuf_bodies(draw: st.DrawFn, valid: pb.ForwardBackwardRequest) -> bytes:
    """The body of a forward_backward with odd fields, tensors and bytes."""
    message = pb.ForwardBackwardRequest()
    message.CopyFrom(valid)
    if draw(st.booleans()):
        message.loss_fn = draw(st.sampled_from(["cross_entropy", "ppo", "custom", "", "\x00", "x" * 1000]))
        message.loss_fn_config_v2[draw(st.sampled_from(["clip_low_threshold", "loss_id", ""]))].number = draw(
            st.floats()
        )
    if draw(st.booleans()):
        message.seq_id = draw(st.integers(-(2**31), 2**31 - 1))
    for name in draw(st.lists(st.sampled_from(["target_tokens", "weights", "advantages", "logprobs"]), max_size=2)):
        message.data[0].loss_fn_inputs[name].CopyFrom(draw(tensors()))
    if draw(st.booleans()):
        message.data[0].model_input[0].encoded_text.tokens = draw(st.binary(max_size=20))
    if draw(st.booleans()):
        message.data.add()
    body = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(0, 2))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.just(len(body)) | st.integers(0, len(body)))])


def list_routes(base: BaseModel, folder: Path) -> list[tuple[str, str]]:
    """List the method and path of every route, those with many fields several times."""
    app = make_app(Engine(Settings(("tiny",), folder, folder), {"tiny": base}, Worker()))
    routes = [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]
    with_fields = [route for route in routes if route[1].rpartition("/")[2] in FIELDS]
    return [*routes, *with_fields * 3]  # the bodies of these have most variants


class Client:
    """HTTP client with a session, a model and a sampler of its own."""

    def __init__(self, http: httpx.Client, data: list[types.Datum]) -> None:
        self.http = http
        self.session = self.post("create_session", {"display_name": "client"})["session_id"]
        self.model = f"{self.session}:train:0"
        self.sampler = f"{self.session}:sample:0"
        self.seq_id = 1
        self.sample_seq_id = 0
        created = self.post(
            "create_model",
            {
                "session_id": self.session,
                "model_seq_id": 0,
                "base_model": "tiny",
                "lora_config": {"rank": 2, "seed": 1},
            },
        )
        self.result(created["request_id"])
        content = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self.post("create_sampling_session", content)
        self.data = data

    def post(self, route: str, content: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(f"/api/v1/{route}", json=content)
        assert response.status_code == 200, response.text
        return response.json()

    def result(self, request_id: str) -> httpx.Response:
        for _ in range(3):  # long polls of 25 s
            response = self.http.post("/api/v1/retrieve_future", json={"request_id": request_id}, timeout=60)
            if response.status_code != 408:
                return response
        pytest.fail(f"The request {request_id} has no result.")

    def pass_request(self, forward_only: bool) -> pb.ForwardBackwardRequest:
        batch = types.ForwardBackwardInput(self.data, "cross_entropy")
        message = forward_backward_request_to_proto(types.ForwardBackwardRequest(batch, self.model, self.seq_id))
        message.forward_only = forward_only
        return message

    def sample_request(self) -> dict[str, Any]:
        return {
            "sampling_session_id": self.sampler,
            "seq_id": self.sample_seq_id,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 8, "seed": 3},
        }


class Witness(Client):
    """Client that asks the same questions again and again."""

    def results(self) -> tuple[bytes, bytes]:
        """Return logprobs and samples; check that all lists of records can be read."""
        body = self.pass_request(forward_only=True).SerializeToString()
        forward = self.http.post("/api/v1/forward_backward", content=body, headers=PROTOBUF).json()
        sample = self.post("asample", self.sample_request())
        self.seq_id += 1
        self.sample_seq_id += 1
        for path in ("sessions", "training_runs", "checkpoints", f"training_runs/{self.model}"):
            assert self.http.get(f"/api/v1/{path}").status_code == 200, path
        sessions = self.post("sessions/search", {"limit": 100, "owner": {"type": "own"}, "session_id": self.session})
        assert [session["session_id"] for session in sessions["sessions"]] == [self.session]
        forward_result, sample_result = (self.result(sent["request_id"]) for sent in (forward, sample))
        assert forward_result.headers["content-type"] == "application/x-protobuf", forward_result.text
        return forward_result.content, sample_result.content


class Fuzzer(Client):
    """Client that sends almost valid and completely invalid requests."""

    def valid_content(self) -> dict[str, Any]:
        """Return a body with the fields of all routes."""
        return {
            **self.sample_request(), "session_id": self.session, "model_id": self.model,
            "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 2}, "path": "a",
            "adam_params": {"learning_rate": 1e-3}, "sampling_session_seq_id": 0,
            "request_id": f"{self.model}:1", "optimizer": True, "user_metadata": {"a": "b"},
            "tinker_path": f"tinker://{self.model}/weights/a", "ttl_seconds": 5, "reason": {"type": "success"},
            "target": {"type": "sampling_session", "sampling_session_id": self.sampler}, "timeout": 0.0,
            "limit": 3, "display_name": "a", "owner": {"type": "own"}, "custom_loss_seq_id": 0, "name": "loss",
            "inputs": [{"name": "logprobs", "rank": 1}], "graph": GRAPH,
            "target_prompt_logprobs": {"data": [3], "dtype": "int64", "shape": [1, 1]},
        }  # fmt: skip

    def path_parts(self) -> dict[str, str]:
        return {
            "run": self.model, "model_id": self.model, "session_id": self.session, "sampler_id": self.sampler,
            "kind": "weights", "name": "a", "request_id": f"{self.model}:1", "rest": "tiny", "file": "config.json",
        }  # fmt: skip

    def send(self, data: st.DataObject, method: str, path: str) -> None:
        """Send one request and fetch its result; fail on a 5xx status, an internal error or a hang."""
        odd = st.sampled_from(["..", "%2e%2e%2f", "a", "-1", "é", "a%00b", "x" * 500, ":", "9" * 5000])
        while "{" in path:
            start, end = path.index("{"), path.index("}")
            known = self.path_parts().get(path[start + 1 : end].removesuffix(":path"), "a")
            path = path[:start] + data.draw(st.just(known) | odd) + path[end + 1 :]
        route = path.rpartition("/")[2]
        if route == "finish" and self.session in path:
            return
        content = self.valid_content()
        if route != "asample":
            content["seq_id"] = self.seq_id
        if (fields := FIELDS.get(route)) is not None:
            content = {name: content[name] for name in fields}
        if route == "forward_backward":
            body = data.draw(protobuf_bodies(self.pass_request(forward_only=False)))
        else:
            valid = mutated(content).map(lambda content: json.dumps(content).encode())
            anything = hostile.map(lambda value: json.dumps(value).encode())
            raw = st.sampled_from(
                [b"", b"\xff\xfe{\x00", b"[" * 100_000, b'{"a":' * 2000, b'{"session_id": "\xed\xa0\x80"}']
            )
            body = data.draw(valid | valid | valid | anything | raw | st.binary(max_size=50))
        encoding = data.draw(st.sampled_from([None, None, None, None, "zstd", "gzip", ""]))
        headers = {} if encoding is None else {"Content-Encoding": encoding}
        if encoding == "zstd" and data.draw(st.booleans()):
            body = zstandard.compress(body)
        query = data.draw(st.sampled_from(["", "", "?limit=-1", "?limit=x&offset=99999999999999999999", "?expires=é"]))
        try:
            response = self.http.request(method, path + query, content=body, headers=headers)
        except httpx.ReadTimeout:
            assert route in LONG_POLLS, (method, path, body[:200])
            return
        except httpx.InvalidURL:
            return
        assert response.status_code < 500, (method, path, body[:200], response.text)
        assert "failed on this request" not in response.text, (method, path, body[:500], response.text)
        if response.status_code == 200 and "application/json" in response.headers["content-type"]:
            self.fetch(route, body, response.json())

    def fetch(self, route: str, body: bytes, response: Any) -> None:
        """Fetch the result of a request that runs now."""
        request_id = response.get("request_id") if isinstance(response, dict) else None
        if not isinstance(request_id, str) or "status" in response:
            return
        if route == "asample":
            self.sample_seq_id += 1
            self.http.post("/api/v1/cancel_future", json={"request_id": request_id})
        elif request_id == f"{self.model}:{self.seq_id}":
            self.seq_id += 1
        elif route != "create_custom_loss":
            return
        result = self.result(request_id)
        assert result.status_code == 200
        if "json" in result.headers["content-type"]:
            assert "failed on this request" not in result.text, (route, body[:500], result.text)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
@pytest.mark.parametrize("num_requests", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_request_breaks_the_engine(
    tmp_path: Path, base: BaseModel, batch: list[types.Datum], num_requests: int
) -> None:
    routes = list_routes(base, tmp_path / "unused")
    assert ("POST", "/api/v1/forward_backward") in routes
    with running_engine(tmp_path / "engine", arguments=("--deterministic",)) as engine:
        with httpx.Client(base_url=engine.url, timeout=httpx.Timeout(20)) as http:
            witness, fuzzer = Witness(http, batch), Fuzzer(http, batch)
            expected = witness.results()
            num_sent = 0

            @settings(
                max_examples=num_requests,
                deadline=None,
                database=None,
                derandomize=num_requests == 200,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.sampled_from(routes), st.data())
            def fuzz(route: tuple[str, str], data: st.DataObject) -> None:
                nonlocal num_sent
                fuzzer.send(data, *route)
                num_sent += 1
                if num_sent % 20 == 0:
                    assert witness.results() == expected

            fuzz()
            assert witness.results() == expected
            assert num_sent >= num_requests
        assert "Traceback" not in engine.log.read_text()

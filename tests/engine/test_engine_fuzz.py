"""Fuzzing of all routes: no 5xx status, no hang, no traceback, and training still works."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import zstandard
from engine_process import API_KEY, running_engine
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from engine.compute.base import BaseModel
from engine.routes.app import make_app
from engine.service.engine import Engine
from engine.service.settings import Settings

HOSTILE: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, 0.5, "", "a", "../../etc/passwd", "a/b", "%00", "\u0000",
    "é" * 300, "x" * 100_000, "tinker://x:train:0/weights/a", "tinker://../weights/a", [], {}, [[]] * 50,
    {"type": "adamw"}, {"a": {"b": []}}, ["tiny"] * 1000, "NaN", "train:0", ":", "tiny",
]  # fmt: skip
WAITING = ("retrieve_future", "retrieve_futures")  # long polls, which may time out


def routes(base: BaseModel, folder: Path) -> list[tuple[str, str]]:
    """List the method and path of every route."""
    app = make_app(Engine(Settings(("tiny",), folder, folder), {"tiny": base}))
    return [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]


class Fuzzer:
    """Sends almost valid and completely invalid bodies."""

    def __init__(self, http: httpx.Client, seed: int, datum: types.Datum) -> None:
        self.http = http
        self.chance = random.Random(seed)
        self.session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        self.model = f"{self.session}:train:0"
        self.sampler = f"{self.session}:sample:0"
        request = types.ForwardBackwardRequest(types.ForwardBackwardInput([datum], "cross_entropy"), self.model, 1)
        self.proto = forward_backward_request_to_proto(request).SerializeToString()
        for path in ("create_model", "create_sampling_session"):
            content = {
                name: value
                for name, value in {**self.valid_content(), "model_seq_id": 0}.items()
                if name in FIELDS[path]
            }
            assert http.post(f"/api/v1/{path}", json=content).status_code == 200

    def valid_content(self) -> dict[str, Any]:
        """Return a body with the fields of all routes."""
        seq_id = self.chance.randrange(40)
        return {
            "session_id": self.session, "model_id": self.model, "seq_id": seq_id,
            "model_seq_id": self.chance.randrange(2), "base_model": "tiny", "lora_config": {"rank": 2},
            "path": self.chance.choice(["a", None]),
            "adam_params": {"learning_rate": 1e-3}, "sampling_session_id": self.sampler, "sampling_session_seq_id": 0,
            "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2}, "request_id": f"{self.model}:{seq_id}", "optimizer": True,
            "tinker_path": f"tinker://{self.model}/weights/a", "ttl_seconds": 5, "reason": {"type": "success"},
            "target": {"type": "sampling_session", "sampling_session_id": self.sampler}, "timeout": 0.0,
            "limit": 3, "display_name": "a",
        }  # fmt: skip

    def body(self, fields: set[str] | None) -> bytes:
        """Return a valid body with some corrupted values, or an invalid body."""
        kind = self.chance.randrange(10)
        if kind == 0:
            return self.chance.randbytes(self.chance.randrange(200))
        if kind == 1:
            return json.dumps(self.chance.choice(HOSTILE)).encode()
        if kind == 2:
            return b"[" * 100_000
        content = copy.deepcopy(self.valid_content())
        if fields is not None:
            content = {name: value for name, value in content.items() if name in fields}
        for _ in range(self.chance.randrange(3)):
            self.corrupt(content)
        return json.dumps(content).encode()

    def corrupt(self, content: Any) -> None:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = self.chance.choice(keys or ["x"])
        value = content[key] if keys else None
        if isinstance(value, dict | list) and value and self.chance.random() < 0.6:
            self.corrupt(value)
        elif keys:
            content[key] = copy.deepcopy(self.chance.choice(HOSTILE))

    def corrupt_proto(self) -> bytes:
        content = bytearray(self.proto)
        for _ in range(self.chance.randrange(4)):
            content[self.chance.randrange(len(content))] = self.chance.randrange(256)
        return bytes(content[: self.chance.choice([len(content), self.chance.randrange(len(content))])])

    def path_part(self, name: str) -> str:
        ids = {"run": self.model, "model_id": self.model, "session_id": self.session, "sampler_id": self.sampler}
        known = {
            **ids,
            "kind": "weights",
            "name": "a",
            "request_id": f"{self.model}:1",
            "rest": "tiny",
            "file": "config.json",
        }
        if self.chance.random() < 0.6 and name in known:
            return known[name]
        return str(self.chance.choice(["..", "%2e%2e%2f", "a", "tiny", "-1", "é", "a%00b", "x" * 500, ":", "tinker:"]))

    def send(self, method: str, path: str) -> None:
        """Send one request; fail on a 5xx status or a hang."""
        while "{" in path:
            start, end = path.index("{"), path.index("}")
            path = path[:start] + self.path_part(path[start + 1 : end].removesuffix(":path")) + path[end + 1 :]
        if path.endswith("/finish") and self.session in path:
            return
        last = path.rpartition("/")[2]
        body, headers = self.body(FIELDS.get(last)), {}
        if last == "forward_backward":
            body = self.corrupt_proto()
        if self.chance.random() < 0.1:
            headers["Content-Encoding"] = self.chance.choice(["zstd", "gzip", ""])
            body = zstandard.compress(body) if self.chance.random() < 0.7 else body
        try:
            query = self.chance.choice(
                ["", "?limit=-1", "?limit=x&offset=99999999999999999999", "?expires=1&signature=é"]
            )
            response = self.http.request(method, path + query, content=body, headers=headers)
        except httpx.ReadTimeout:
            assert last in WAITING, (method, path, body[:200])
            return
        except httpx.InvalidURL:
            return
        assert response.status_code < 500, (method, path, body[:200], response.text)


FIELDS: dict[str, set[str]] = {
    "create_model": {"session_id", "model_seq_id", "base_model", "lora_config"},
    "load_weights": {"model_id", "seq_id", "path", "optimizer"},
    "optim_step": {"model_id", "seq_id", "adam_params"},
    "save_weights": {"model_id", "seq_id", "path"},
    "save_weights_external": {"model_id", "seq_id", "path"},
    "save_weights_for_sampler": {"model_id", "seq_id", "sampling_session_seq_id"},
    "create_sampling_session": {"session_id", "sampling_session_seq_id", "base_model"},
    "search": {"limit", "display_name"},
    "retrieve_futures": {"target", "timeout"},
    "asample": {"sampling_session_id", "seq_id", "num_samples", "prompt", "sampling_params"},
}


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
@pytest.mark.parametrize("num_rounds", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_breaks_the_engine(
    tmp_path: Path, base: BaseModel, batch: list[types.Datum], num_rounds: int
) -> None:
    targets = routes(base, tmp_path / "unused")
    assert ("POST", "/api/v1/forward_backward") in targets
    with running_engine(tmp_path / "engine") as engine:
        with httpx.Client(base_url=engine.url, timeout=httpx.Timeout(20, read=2)) as http:
            fuzzer = Fuzzer(http, num_rounds, batch[0])
            for method, path in targets * num_rounds:
                fuzzer.send(method, path)
        with tinker.ServiceClient(base_url=engine.url, api_key=API_KEY) as service:
            trainer = service.create_lora_training_client(base_model="tiny", rank=2).result()
            assert trainer.forward_backward(batch, "cross_entropy").result().metrics["loss:sum"] > 0
        assert "Traceback" not in engine.log.read_text()

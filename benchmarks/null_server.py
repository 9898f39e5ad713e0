"""Tinker service that does nothing; the duration of a step with it is the cost of the SDK and HTTP.

``python -m benchmarks.null_server MODEL CYCLE_S`` prints its URL and serves until standard input is closed. Training
requests complete on the ticks of a clock, as on the hosted service, or immediately if CYCLE_S is 0. GET
`/api/v1/counts` returns the numbers of requests by route, and of results by kind (`result:optim_step`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any

import torch
import uvicorn
from starlette.types import Receive, Scope, Send

from engine.listen import bind
from engine.wire.forward_backward import decode_request, encode_output
from engine.wire.tensors import decode_tensor

_JSON, _PROTOBUF = b"application/json", b"application/x-protobuf"
_IMMEDIATE = ("create_model", "load_weights")


class _NullService:
    """ASGI application. A request id holds everything that its result needs: `KIND|NUMBER|READY_AT|DETAIL`."""

    def __init__(self, model: str, cycle_s: float) -> None:
        self._model = model
        self._cycle_s = cycle_s
        self._numbers = count()
        self._counts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        route = scope["path"].removeprefix("/api/v1/")
        self._counts[route] += 1
        content_type, content = await self._respond(route, body)
        headers = [(b"content-type", content_type), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _respond(self, route: str, body: bytes) -> tuple[bytes, bytes]:
        """Return the content type and body of a response."""
        if route == "retrieve_future":
            return await self._result(json.loads(body)["request_id"])
        return _JSON, json.dumps(self._immediate(route, body)).encode()

    def _immediate(self, route: str, body: bytes) -> dict[str, Any]:
        if route == "forward_backward":
            request = decode_request(body)
            targets = (decode_tensor(datum.loss_fn_inputs["target_tokens"], "target_tokens") for datum in request.data)
            return self._queue(route, request.model_id, ",".join(str(targets_T.size) for targets_T in targets))
        content = json.loads(body or b"{}")
        if route == "create_model":
            model_id = f"{content['session_id']}:train:{next(self._numbers)}"
            return self._queue(route, model_id, model_id)
        if route == "get_info":
            data = {"model_name": self._model}
            return {"model_id": content["model_id"], "model_data": data, "type": "get_info"}
        if route in ("optim_step", "save_weights", "save_weights_for_sampler"):
            return self._queue(route, content["model_id"], f"{content['model_id']}/{content.get('path')}")
        if route == "create_session":
            return {"session_id": f"session{next(self._numbers)}", "type": "create_session"}
        model = {"model_name": self._model, "max_context_length": 32768}
        contents: dict[str, Any] = {
            "client/config": {"pjwt_auth_enabled": False},
            "counts": self._counts,
            "get_server_capabilities": {"supported_models": [model]},
            "session_heartbeat": {"type": "session_heartbeat"},
            "telemetry": {"status": "accepted"},
        }
        return contents.get(route, {})

    def _queue(self, kind: str, model_id: str, detail: str) -> dict[str, str]:
        now = time.monotonic()
        ready_at = now if kind in _IMMEDIATE or not self._cycle_s else now + self._cycle_s - now % self._cycle_s
        return {"request_id": f"{kind}|{next(self._numbers)}|{ready_at}|{detail}", "model_id": model_id}

    async def _result(self, request_id: str) -> tuple[bytes, bytes]:
        kind, _, ready_at, detail = request_id.split("|", 3)
        delay_s = float(ready_at) - time.monotonic()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        self._counts[f"result:{kind}"] += 1
        if kind == "forward_backward":
            return _PROTOBUF, _output(detail)
        contents: dict[str, Any] = {
            "create_model": {"model_id": detail, "type": "create_model"},
            "save_weights": {"path": f"tinker://{detail}", "type": "save_weights"},
            "save_weights_for_sampler": {"path": f"tinker://{detail}", "type": "save_weights_for_sampler"},
        }
        return _JSON, json.dumps(contents.get(kind, {"metrics": {}})).encode()


@lru_cache(maxsize=1024)
def _output(lengths: str) -> bytes:
    """Encode logprobs of -1 nat for datums of the lengths."""
    return encode_output([-torch.ones(int(length)) for length in lengths.split(",")], {"loss:sum": 1.0})


@contextmanager
def null_server(model: str = "none", cycle_s: float = 0.0) -> Iterator[str]:
    """Run the server in a separate process until the block ends; yields its URL.

    Args:
        model: name or directory of the model that it offers.
        cycle_s: seconds between the ticks of its clock; 0: no clock.
    """
    command = [sys.executable, "-m", "benchmarks.null_server", model, str(cycle_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def _main() -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()
    service = _NullService(sys.argv[1], float(sys.argv[2]))
    server = uvicorn.Server(uvicorn.Config(service, log_level="warning", access_log=False, lifespan="off"))

    def stop_with_stdin() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_with_stdin, daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    _main()

"""Tinker service that does nothing; the duration of a step with it is the cost of the SDK and HTTP.

``python -m benchmarks.null_server`` prints its URL and serves until standard input is closed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import uvicorn
from starlette.types import Receive, Scope, Send

from engine.listen import bind
from engine.wire.forward_backward import encode_output

_numbers = count()
_OUTPUT = encode_output([torch.zeros(1)], {"loss:sum": 1.0})
_MODEL = {"model_id": "session:train:0"}


def _response(route: str, body: bytes) -> tuple[bytes, bytes]:
    """Return the content type and body of a response."""
    if route == "retrieve_future":
        kind = json.loads(body)["request_id"].split(":")[0]
        if kind == "forward_backward":
            return b"application/x-protobuf", _OUTPUT
        content = {**_MODEL, "type": "create_model"} if kind == "create_model" else {"metrics": {}}
        return b"application/json", json.dumps(content).encode()
    contents: dict[str, Any] = {
        "client/config": {"pjwt_auth_enabled": False},
        "create_session": {"session_id": "session", "type": "create_session"},
        "get_info": {**_MODEL, "model_data": {"model_name": "none"}, "type": "get_info"},
        "telemetry": {"status": "accepted"},
    }
    queued = {"request_id": f"{route}:{next(_numbers)}", **_MODEL}
    return b"application/json", json.dumps(contents.get(route, queued)).encode()


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    content_type, content = _response(scope["path"].removeprefix("/api/v1/"), body)
    headers = [(b"content-type", content_type), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@contextmanager
def null_server() -> Iterator[str]:
    """Run the server in a separate process until the block ends; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.null_server"]
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
    server = uvicorn.Server(uvicorn.Config(_app, log_level="warning", access_log=False, lifespan="off"))

    def stop_with_stdin() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_with_stdin, daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    _main()

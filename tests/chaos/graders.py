"""Server of an environment or a judge: it grades texts, and can be killed like every other server."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32


def grade(text: str) -> float:
    """Return 0, 0.5 or 1: about every third pair of texts has equal grades.

    >>> [grade(text) for text in ("a", "b", "c")]
    [0.0, 1.0, 0.0]
    """
    return crc32(text.encode()) % 3 / 2


class Grader(BaseHTTPRequestHandler):
    """Answers a JSON list of texts with the list of their grades."""

    def do_GET(self) -> None:  # the health check
        self._respond(None)

    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._respond([grade(text) for text in texts])

    def _respond(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Grader).serve_forever()

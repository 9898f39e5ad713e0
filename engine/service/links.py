"""Links to files that open without a key until they expire, for downloads by plain HTTP clients."""

from __future__ import annotations

import hmac
import secrets
import time

LIFETIME_S = 3600


class Links:
    """Signs paths; what one run of the engine signed, the next does not honour."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str) -> tuple[str, int]:
        """``path`` with an expiry and a signature as its query, and the expiry in Unix seconds."""
        expires = int(time.time()) + LIFETIME_S
        return f"{path}?expires={expires}&signature={self._signature(path, expires)}", expires

    def is_good(self, path: str, expires: int, signature: str) -> bool:
        """Whether this is a signature of ours that has not expired."""
        expected = self._signature(path, expires)
        return hmac.compare_digest(expected.encode(), signature.encode()) and time.time() < expires

    def _signature(self, path: str, expires: int) -> str:
        return hmac.digest(self._secret, f"{path}?{expires}".encode(), "sha256").hex()

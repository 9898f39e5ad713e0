"""Reachability check against real sockets."""

from __future__ import annotations

import socket

import pytest

from blocks import TinkerService
from blocks.errors import ServiceError
from blocks.urls import check_reachable


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://nowhere.invalid", "not known|Temporary failure|No address"),
        ("127.0.0.1:80", "missing an .http:"),
        ("somewhere", "missing an 'http://' or 'https://' protocol"),
        ("http://127.0.0.1:99999999", "refused|Invalid port"),
        ("http://a\x00b", "non-printable"),
    ],
)
def test_an_unreachable_url_raises_one_sentence(url: str, why: str) -> None:
    with pytest.raises(ServiceError, match=rf"^The thing does not respond \(.*({why}).*\): look elsewhere\.$"):
        check_reachable("The thing", url, 5, "look elsewhere")


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServiceError, match=r"does not respond \(timed out\)"):
            check_reachable("The thing", url, 0.2, "look elsewhere")


def test_any_response_counts_as_reachable(own_engine: TinkerService) -> None:
    check_reachable("The engine", f"{own_engine.base_url}/no/such/page", 5, "")


def test_checks_share_the_tls_settings(own_engine: TinkerService, monkeypatch: pytest.MonkeyPatch) -> None:
    check_reachable("The engine", own_engine.base_url, 5, "")
    monkeypatch.delattr("ssl.create_default_context")
    check_reachable("The engine", own_engine.base_url, 5, "")

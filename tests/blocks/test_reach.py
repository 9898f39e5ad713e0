"""The first look at a server, at real sockets."""

from __future__ import annotations

import socket

import pytest

from blocks import TinkerService
from blocks.errors import ServiceError
from blocks.reach import check_answers


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
def test_what_cannot_be_reached_is_one_sentence(url: str, why: str) -> None:
    with pytest.raises(ServiceError, match=rf"^The thing does not answer \(.*({why}).*\): look elsewhere\.$"):
        check_answers("The thing", url, 5, "look elsewhere")


def test_a_server_that_accepts_and_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServiceError, match=r"does not answer \(timed out\)"):
            check_answers("The thing", url, 0.2, "look elsewhere")


def test_any_answer_is_one(own_engine: TinkerService) -> None:
    check_answers("The engine", f"{own_engine.base_url}/no/such/page", 5, "")

"""Fact checks with a real SQLite file and a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from ragged_batches import make_batch
from test_evaluate import bind, evaluate, finite_differences

from objectives import ObjectiveError, prepare_features
from objectives.terms.text import knowledge, lookups
from objectives.terms.text.knowledge import MAX_FACTS, FactCounts, find_facts
from objectives.terms.text.lookups import Lookups

PATTERN = r"capital of (?P<country>\w+(?: \w+)?) is (?P<value>\w+)"
QUERY = "SELECT city FROM capitals WHERE country = :country"
TEXTS = [
    "The capital of Peru is Lima. The capital of Chile is Lima.",
    "The capital of Atlantis is Poseidonis, that of nothing.",
    "The capital of Bolivia is sucre, or rather: the capital of Bolivia is La.",
]
CAPITALS = {"Peru": ["Lima"], "Chile": ["Santiago"], "Bolivia": ["Sucre", "La Paz"], "Costa Rica": ["San José"]}
CHECKED = [FactCounts(1, 1, 0), FactCounts(0, 0, 1), FactCounts(1, 1, 0)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "world facts.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE capitals (country, city)")
        rows = [(country, city) for country, cities in CAPITALS.items() for city in cities]
        connection.executemany("INSERT INTO capitals VALUES (?, ?)", rows)
    connection.close()
    return path


@dataclass
class FakeServer:
    """State of a knowledge-base server and the keys that were requested."""

    url: str = ""
    requested: list[str] = field(default_factory=list)
    answers: dict[str, object] = field(default_factory=lambda: dict(CAPITALS))
    failing: bool = False


@pytest.fixture
def served() -> Iterator[FakeServer]:
    state = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (country,) = parse_qs(urlsplit(self.path).query)["of"]
            state.requested.append(country)
            status = 503 if state.failing else 200 if country in state.answers else 404
            body = json.dumps(state.answers.get(country)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/capital?of={{country}}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def check(texts: list[str], **params: object) -> list[FactCounts]:
    """Prepare features as a run does."""
    bound = bind("knowledge", params={"pattern": PATTERN, "per_second": 1000, **params})
    return prepare_features(bound, batch_of(texts)[0])


def batch_of(texts: list[str]):
    return make_batch([2] * len(texts), texts=texts)


def test_facts_are_found_up_to_the_limit():
    assert find_facts(TEXTS[0], PATTERN) == [((("country", "Peru"),), "Lima"), ((("country", "Chile"),), "Lima")]
    assert len(find_facts("capital of A is B. " * 200, PATTERN)) == MAX_FACTS


def test_texts_are_checked_with_sqlite(database):
    batch, outputs = batch_of(TEXTS)
    bound = bind("knowledge", params={"source": str(database), "query": QUERY, "pattern": PATTERN})
    evaluation = evaluate(bound, outputs, batch)
    counts = {"contradicted": 2, "confirmed": 2, "unknown": 1, "checked": 4}
    assert evaluation.metrics == counts | {"trained_prompts": 1.0}
    assert evaluation.gradient_DT.tolist() == pytest.approx(finite_differences(bound, outputs, batch), abs=1e-8)
    assert (evaluation.gradient_DT[2:4] < 0).all()  # the text without a contradiction becomes likelier
    assert (evaluation.gradient_DT[[0, 1, 4, 5]] > 0).all()


@pytest.mark.parametrize(
    ("stated", "known", "confirmed"),
    [
        ("330", 330.0, 1),
        ("161.530", 161.53, 1),
        ("0.00001", 1e-05, 1),
        ("20000000000000000", 2e16, 1),
        ("20000000000000001", 2e16, 0),
        ("-2", "-2.00", 1),
        ("331", 330.0, 0),
        ("7", "007", 0),
        ("0.5", ".5", 0),
        ("-0", 0, 1),
        ("1" + "0" * 29 + "1", "1" + "0" * 29 + "2", 0),
    ],
)
def test_numbers_compare_as_numbers(tmp_path, stated, known, confirmed):
    path = tmp_path / "heights.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE heights (tower, height)")
        connection.execute("INSERT INTO heights VALUES ('Eiffel', ?)", (known,))
    connection.close()
    pattern = r"(?P<tower>\w+) is (?P<value>-?[0-9.]*[0-9]) m"
    params = {"source": str(path), "pattern": pattern, "query": "SELECT height FROM heights WHERE tower = :tower"}
    batch, _ = make_batch([1], texts=[f"Eiffel is {stated} m high."])
    assert prepare_features(bind("knowledge", params=params), batch) == [FactCounts(1 - confirmed, confirmed, 0)]


def test_each_fact_is_requested_over_http_once(served):
    assert check(TEXTS, source=served.url) == CHECKED
    assert sorted(served.requested) == ["Atlantis", "Bolivia", "Chile", "Peru"]
    served.failing = True
    assert check(TEXTS, source=served.url) == CHECKED  # all values are cached

    async def within_a_loop():
        return check(TEXTS, source=served.url)

    assert asyncio.run(within_a_loop()) == CHECKED
    assert len(served.requested) == 4


def test_text_cannot_change_the_request_url(served):
    assert check(["capital of Costa Rica is San"], source=served.url) == [FactCounts(1, 0, 0)]
    pattern = r"of (?P<country>\S+) is (?P<value>\w+)"
    assert check(["of Peru&of=Chile#/../ is Lima"], source=served.url, pattern=pattern) == [FactCounts(0, 0, 1)]
    assert served.requested == ["Costa Rica", "Peru&of=Chile#/../"]


def test_requests_are_rate_limited(monkeypatch):
    now = 100.0
    monkeypatch.setattr(lookups.time, "monotonic", lambda: now)
    limited = Lookups()
    assert [limited.reserve_slot("slots.example", per_second=4) for _ in range(4)] == [0, 0.25, 0.5, 0.75]
    assert limited.reserve_slot("other.example", per_second=4) == 0
    now = 200.0
    assert limited.reserve_slot("slots.example", per_second=4) == 0


def test_the_oldest_cached_values_are_evicted(served, monkeypatch):
    small = Lookups(max_cached=2)
    monkeypatch.setattr(knowledge, "look_up", small.look_up)
    for text in (TEXTS[0], TEXTS[2], TEXTS[2], TEXTS[0]):
        check([text], source=served.url)
    assert len(small) == 2
    assert served.requested.count("Bolivia") == 1
    assert served.requested.count("Peru") + served.requested.count("Chile") == 3


def test_failures_raise_one_sentence_and_are_retried(served, tmp_path, database):
    def prepare(**params):
        return check(TEXTS[:1], **params)

    served.failing = True
    with pytest.raises(ObjectiveError, match=r"failed preparing: the request http.* failed \(HTTPStatusError: .*503"):
        prepare(source=served.url)
    served.failing = False
    served.answers["Peru"] = {"city": "Lima"}
    with pytest.raises(ObjectiveError, match=r"its response is .*, but a string, number or boolean is expected"):
        prepare(source=served.url)
    served.answers["Peru"] = "Lima"
    assert prepare(source=served.url) == [FactCounts(1, 1, 0)]
    with pytest.raises(ObjectiveError, match=r"failed \(ConnectError: "):
        prepare(source="http://127.0.0.1:9/{country}")
    for source in ("http://127.0.0.1:9/{land}", "http://127.0.0.1:9/{}"):
        with pytest.raises(ObjectiveError, match=r"does not fit the pattern .*: write the names of .* \(country\)"):
            prepare(source=source)
    with pytest.raises(ObjectiveError, match=r"failed \(unable to open database file\): check the path"):
        prepare(source=str(tmp_path / "none.db"), query=QUERY)
    with pytest.raises(ObjectiveError, match=r"of the SQLite file .* failed \(You did not supply a value for binding"):
        prepare(source=str(database), query="SELECT city FROM capitals WHERE country = :land")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", "is not a regular expression"), (r"(?P<value>\w+)", "needs a group"), (r"(?P<a>\w+) \w", "needs a group")],
)
def test_a_pattern_is_validated_on_construction(pattern, message):
    with pytest.raises(ObjectiveError, match=f"'pattern' is .* but value error, .* {message}"):
        bind("knowledge", params={"source": "x.db", "pattern": pattern})

"""Feature cache: one computation per datum, storage as lines, and invalidation."""

from __future__ import annotations

import linecache
import sys
import types
import zlib
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch

from objectives import Objective, ObjectiveError, regularizer
from objectives.batch import Batch
from objectives.feature_cache import FeatureCache
from objectives.jsonl_cache import CorruptCacheError
from objectives.term import own_params, per_datum


@dataclass(frozen=True, slots=True)
class Count:
    words: int
    parts: tuple[str, ...]


PREPARED: list[str] = []


@per_datum()
def count_words(batch: Batch, *, prefix: str = "") -> list[Count]:
    PREPARED.extend(batch.texts_D)
    return [Count(len(text.split()), (prefix, text)) for text in batch.texts_D]


@regularizer("test_words", "scored", prepare=count_words)
def words(outputs, batch):
    return [float(feature.words) for feature in batch.features]


def bind(**fields):
    return Objective(regularizers=[{"name": "test_words", **fields}])


@pytest.fixture(autouse=True)
def clear_prepared():
    PREPARED.clear()


def batch_of(*texts: str) -> Batch:
    batch, _ = make_batch([2] * len(texts), texts=texts)
    tokens_DT = torch.tensor([ord(text[0]) for text in texts]).repeat_interleave(2)
    return replace(batch, target_tokens_DT=tokens_DT, weights_DT=torch.ones(len(tokens_DT)))


def test_a_datum_is_prepared_once_across_batches():
    objective = bind()
    (term,) = objective.regularizers
    assert objective.runner.prepare(term, batch_of("a b", "c")) == [Count(2, ("", "a b")), Count(1, ("", "c"))]
    features = objective.runner.prepare(term, batch_of("c", "d e f", "a b", "d e f"))
    assert [feature.words for feature in features] == [1, 3, 2, 3]
    assert isinstance(features[0], Count)
    assert PREPARED == ["a b", "c", "d e f", "d e f"]
    assert objective.runner.prepare(term, batch_of("c", "d e f")) == features[:2]
    assert len(PREPARED) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda batch: replace(batch, target_tokens_DT=batch.target_tokens_DT + 1),
        lambda batch: replace(batch, weights_DT=torch.tensor([0.0, 1.0])),
        lambda batch: replace(batch, texts_D=("b",)),
    ],
)
def test_a_changed_datum_is_prepared_again(other):
    objective = bind()
    (term,) = objective.regularizers
    batch = batch_of("a")
    objective.runner.prepare(term, batch)
    objective.runner.prepare(term, replace(batch, weights_DT=batch.weights_DT * 3))  # trained all the same
    assert len(PREPARED) == 1
    objective.runner.prepare(term, other(batch))
    assert len(PREPARED) == 2


def test_changed_parameters_or_functions_are_prepared_again():
    cache = FeatureCache()
    for fields in ({}, {"params": {"prefix": "x"}}, {"params": {"alpha": 3}}):
        objective = bind(**fields)
        objective.runner.cache = cache
        objective.runner.prepare(objective.regularizers[0], batch_of("a"))
    assert PREPARED == ["a", "a"]  # alpha is the estimator's


def test_datums_without_a_trained_token_are_prepared_with_their_batch():
    objective = bind()
    (term,) = objective.regularizers
    batch = replace(batch_of("a", "b"), weights_DT=torch.tensor([1.0, 1, 0, 0]))
    objective.runner.prepare(term, replace(batch_of("a"), weights_DT=torch.ones(2)))
    assert [feature.parts[1] for feature in objective.runner.prepare(term, batch)] == ["a", "b"]


def test_a_resumed_run_loads_the_cache():
    first = bind()
    first.runner.prepare(first.regularizers[0], batch_of("a", "b"))
    lines = [first.runner.cache.pop_unsaved()]
    assert first.runner.cache.pop_unsaved() is None
    first.runner.prepare(first.regularizers[0], batch_of("a", "c"))
    lines.append(first.runner.cache.pop_unsaved())
    content = "".join(f"{line}\n" for line in lines).encode()

    second = bind()
    assert second.runner.cache.load(content) == len(content)
    assert second.runner.prepare(second.regularizers[0], batch_of("c", "a")) == [
        Count(1, ("", "c")),
        Count(1, ("", "a")),
    ]
    assert PREPARED == ["a", "b", "c"]
    assert second.runner.cache.pop_unsaved() is None


def save(*batches: Batch) -> bytes:
    objective = bind()
    content = b""
    for batch in batches:
        objective.runner.prepare(objective.regularizers[0], batch)
        content += f"{objective.runner.cache.pop_unsaved()}\n".encode()
    return content


@given(st.data())
def test_a_truncated_last_line_is_dropped(data):
    content = save(batch_of("a"), batch_of("b"))
    first_line = content.index(b"\n") + 1
    torn = content[: data.draw(st.integers(first_line + 1, len(content) - 2))]
    assert FeatureCache().load(torn) == first_line
    assert FeatureCache().load(torn + b"\n") == first_line  # as an appending writer closes it


@given(st.data())
def test_a_broken_line_raises(data):
    content = bytearray(save(batch_of("a"), batch_of("b"), batch_of("c")))
    place = data.draw(st.integers(0, content.index(b"\n") - 1))
    content[place] ^= data.draw(st.integers(1, 255).filter(lambda bits: content[place] ^ bits != ord("\n")))
    cache = FeatureCache()
    with pytest.raises(CorruptCacheError, match="line 1 of 3 is broken"):
        cache.load(bytes(content))
    assert cache._values == {}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (lambda batch: [1], "prepared 1 features for 2 datums"),
        (lambda batch: None, "'test_unkept' is declared per_datum but prepared NoneType for 2 datums; return a list"),
        (lambda batch: [object()] * 2, "cannot be stored as JSON"),
        (lambda batch: [Fraction(1, 3)] * 2, "cannot be stored as JSON"),
        (
            lambda batch: [(1, 2)] * 2,
            r"cannot be stored as JSON \(\(1, 2\) becomes \[1, 2\]\); annotate the return type of prepare",
        ),
    ],
)
def test_features_that_are_not_per_datum_or_not_json_raise(features, message):
    @regularizer("test_unkept", "scored", prepare=per_datum()(features))
    def unkept(outputs, batch):
        return [0.0] * batch.num_datums

    objective = Objective(regularizers=[{"fn": unkept}])
    with pytest.raises(ObjectiveError, match=message):
        objective.runner.prepare(objective.regularizers[0], batch_of("a", "b"))


def test_entries_of_another_type_are_prepared_again():
    line = save(batch_of("a")).decode().partition(" ")[2].replace('"words":1', '"wrods":1')
    content = f"{zlib.crc32(line.strip().encode()):08x} {line}".encode()
    objective = bind()
    assert objective.runner.cache.load(content) == len(content)
    assert objective.runner.prepare(objective.regularizers[0], batch_of("a")) == [Count(1, ("", "a"))]
    assert PREPARED == ["a", "a"]


def test_features_of_version_zero_are_cached():
    def prepare_words(batch: Batch) -> list[int]:
        PREPARED.extend(batch.texts_D)
        return [len(text.split()) for text in batch.texts_D]

    @regularizer("test_version_zero", "scored", prepare=per_datum(version=0)(prepare_words))
    def version_zero(outputs, batch):
        return [0.0] * batch.num_datums

    objective = Objective(regularizers=[{"fn": version_zero}])
    for _ in range(2):
        objective.runner.prepare(objective.regularizers[0], batch_of("a"))
    assert PREPARED == ["a"]


@pytest.mark.parametrize("name", ["logic", "topology"])
def test_built_in_text_terms_are_prepared_once(name):
    objective = Objective(regularizers=[{"name": name}])
    (term,) = objective.regularizers
    batch = batch_of("<<1+1=2>> <<2+2=5>> #### 2", "#### 3")
    features = objective.runner.prepare(term, batch)
    assert term.term.prepare is not None
    assert features == term.term.prepare(batch, **own_params(term.term.prepare, term.params))
    assert objective.runner.cache.pop_unsaved() is not None
    assert objective.runner.prepare(term, batch) == features
    assert objective.runner.cache.pop_unsaved() is None


@per_datum()
def count_after(start: str, batch: Batch, *, prefix: str = "") -> list[Count]:
    return [Count(count.words, (start, *count.parts)) for count in count_words(batch, prefix=prefix)]


def test_a_changed_function_of_a_notebook_is_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a notebook's cells has no source of its own."""
    notebook = types.ModuleType("notebook_of_a_test")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    cache, features = FeatureCache(), []
    for cell, value in enumerate((1.0, 2.0)):
        source, file = f"def prepare(batch):\n    return [{value}] * batch.num_datums\n", f"<cell {cell}>"
        monkeypatch.setitem(linecache.cache, file, (len(source), None, source.splitlines(keepends=True), file))
        exec(compile(source, file, "exec"), notebook.__dict__)
        prepare = per_datum()(notebook.prepare)
        term = replace(words, name="test_cell", prepare=prepare)
        (bound,) = Objective(regularizers=[{"name": "test_cell", "fn": term}]).regularizers
        features += cache.features(bound, batch_of("a b"), prepare)
    assert features == [1.0, 2.0]


def test_a_partial_is_cached_by_its_arguments():
    cache = FeatureCache()
    parts = []
    for start, prefix in (("so", "x"), ("thus", "x"), ("so", "y"), ("so", "x")):
        prepare = partial(count_after, start, prefix=prefix)

        @regularizer(f"test_{start}_{prefix}", "scored", prepare=prepare)
        def partial_words(outputs, batch):
            return [float(feature.words) for feature in batch.features]

        objective = Objective(regularizers=[{"name": "test_partial", "fn": partial_words}])
        objective.runner.cache = cache
        (feature,) = objective.runner.prepare(objective.regularizers[0], batch_of("a b"))
        assert isinstance(feature, Count)
        parts.append(feature.parts)
    assert parts == [("so", "x", "a b"), ("thus", "x", "a b"), ("so", "y", "a b"), ("so", "x", "a b")]
    assert PREPARED == ["a b"] * 3

"""Features by the content of a datum: computed once, kept as lines, and never the wrong ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch

from objectives import Objective, ObjectiveError, regularizer
from objectives.batch import Batch
from objectives.feature_cache import FeatureCache
from objectives.kept import CorruptKeptError
from objectives.per_datum import per_datum


@dataclass(frozen=True, slots=True)
class Count:
    words: int
    parts: tuple[str, ...]


ASKED: list[str] = []


@per_datum()
def count_words(batch: Batch, *, prefix: str = "") -> list[Count]:
    ASKED.extend(batch.texts_D)
    return [Count(len(text.split()), (prefix, text)) for text in batch.texts_D]


@regularizer("test_words", "scored", prepare=count_words)
def words(outputs, batch):
    return [float(each.words) for each in batch.features]


def bind(**fields):
    return Objective(regularizers=[{"name": "test_words", **fields}])


@pytest.fixture(autouse=True)
def nothing_asked():
    ASKED.clear()


def batch_of(*texts: str) -> Batch:
    batch, _ = make_batch([2] * len(texts), texts=texts)
    tokens_DT = torch.tensor([ord(text[0]) for text in texts]).repeat_interleave(2)
    return replace(batch, target_tokens_DT=tokens_DT, weights_DT=torch.ones(len(tokens_DT)))


def test_a_datum_is_asked_about_once_whatever_the_batch():
    objective = bind()
    (term,) = objective.regularizers
    assert objective.runner.prepare(term, batch_of("a b", "c")) == [Count(2, ("", "a b")), Count(1, ("", "c"))]
    features = objective.runner.prepare(term, batch_of("c", "d e f", "a b", "d e f"))
    assert [each.words for each in features] == [1, 3, 2, 3]
    assert isinstance(features[0], Count)
    assert ASKED == ["a b", "c", "d e f", "d e f"]
    assert objective.runner.prepare(term, batch_of("c", "d e f")) == features[:2]
    assert len(ASKED) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda batch: replace(batch, target_tokens_DT=batch.target_tokens_DT + 1),
        lambda batch: replace(batch, weights_DT=torch.tensor([0.0, 1.0])),
        lambda batch: replace(batch, texts_D=("b",)),
    ],
)
def test_another_datum_is_asked_about_again(other):
    objective = bind()
    (term,) = objective.regularizers
    batch = batch_of("a")
    objective.runner.prepare(term, batch)
    objective.runner.prepare(term, replace(batch, weights_DT=batch.weights_DT * 3))  # trained all the same
    assert len(ASKED) == 1
    objective.runner.prepare(term, other(batch))
    assert len(ASKED) == 2


def test_other_parameters_and_other_functions_are_asked_again():
    cache = FeatureCache()
    for fields in ({}, {"params": {"prefix": "x"}}, {"params": {"alpha": 3}}):
        objective = bind(**fields)
        objective.runner.cache = cache
        objective.runner.prepare(objective.regularizers[0], batch_of("a"))
    assert ASKED == ["a", "a"]  # alpha is the estimator's


def test_datums_without_a_trained_token_are_prepared_with_their_batch():
    objective = bind()
    (term,) = objective.regularizers
    batch = replace(batch_of("a", "b"), weights_DT=torch.tensor([1.0, 1, 0, 0]))
    objective.runner.prepare(term, replace(batch_of("a"), weights_DT=torch.ones(2)))
    assert [each.parts[1] for each in objective.runner.prepare(term, batch)] == ["a", "b"]


def test_a_later_part_of_the_run_starts_with_what_was_kept():
    first = bind()
    first.runner.prepare(first.regularizers[0], batch_of("a", "b"))
    lines = [first.runner.cache.take_unsaved()]
    assert first.runner.cache.take_unsaved() is None
    first.runner.prepare(first.regularizers[0], batch_of("a", "c"))
    lines.append(first.runner.cache.take_unsaved())
    content = "".join(f"{line}\n" for line in lines).encode()

    second = bind()
    assert second.runner.cache.load(content) == len(content)
    assert second.runner.prepare(second.regularizers[0], batch_of("c", "a")) == [
        Count(1, ("", "c")),
        Count(1, ("", "a")),
    ]
    assert ASKED == ["a", "b", "c"]
    assert second.runner.cache.take_unsaved() is None


def kept(*batches: Batch) -> bytes:
    objective = bind()
    content = b""
    for batch in batches:
        objective.runner.prepare(objective.regularizers[0], batch)
        content += f"{objective.runner.cache.take_unsaved()}\n".encode()
    return content


@given(st.data())
def test_a_torn_tail_costs_only_its_line(data):
    content = kept(batch_of("a"), batch_of("b"))
    whole = content.index(b"\n") + 1
    torn = content[: data.draw(st.integers(whole + 1, len(content) - 2))]
    assert FeatureCache().load(torn) == whole
    assert FeatureCache().load(torn + b"\n") == whole  # as an appending writer closes it


@given(st.data())
def test_a_broken_line_is_never_read(data):
    content = bytearray(kept(batch_of("a"), batch_of("b"), batch_of("c")))
    place = data.draw(st.integers(0, content.index(b"\n") - 1))
    content[place] ^= data.draw(st.integers(1, 255).filter(lambda bits: content[place] ^ bits != ord("\n")))
    cache = FeatureCache()
    with pytest.raises(CorruptKeptError, match="line 1 of 3 is broken"):
        cache.load(bytes(content))
    assert cache._known == {}


@pytest.mark.parametrize(
    ("features", "says"),
    [
        (lambda batch: [1], "prepared 1 features of 2 datums"),
        (lambda batch: [object()] * 2, "cannot be kept as JSON"),
        (lambda batch: [Fraction(1, 3)] * 2, "cannot be kept as JSON"),
        (lambda batch: [(1, 2)] * 2, r"cannot be kept as JSON \(\(1, 2\) is \[1, 2\] there\): annotate what prepare"),
    ],
)
def test_features_that_are_not_per_datum_or_no_json_are_refused(features, says):
    @regularizer("test_unkept", "scored", prepare=per_datum()(features))
    def unkept(outputs, batch):
        return [0.0] * batch.num_datums

    objective = Objective(regularizers=[{"fn": unkept}])
    with pytest.raises(ObjectiveError, match=says):
        objective.runner.prepare(objective.regularizers[0], batch_of("a", "b"))


def test_what_was_kept_as_another_type_is_asked_again():
    line = kept(batch_of("a")).decode().partition(" ")[2].replace('"words":1', '"wrods":1')
    content = f"{zlib.crc32(line.strip().encode()):08x} {line}".encode()
    objective = bind()
    assert objective.runner.cache.load(content) == len(content)
    assert objective.runner.prepare(objective.regularizers[0], batch_of("a")) == [Count(1, ("", "a"))]
    assert ASKED == ["a", "a"]


@pytest.mark.parametrize("name", ["logic", "topology"])
def test_the_built_in_terms_that_read_texts_are_asked_once(name):
    objective = Objective(regularizers=[{"name": name}])
    (term,) = objective.regularizers
    batch = batch_of("<<1+1=2>> <<2+2=5>> #### 2", "#### 3")
    features = objective.runner.prepare(term, batch)
    assert term.term.prepare is not None
    assert features == term.term.prepare(batch, **{key: term.params[key] for key in term.params if key != "alpha"})
    assert objective.runner.cache.take_unsaved() is not None
    assert objective.runner.prepare(term, batch) == features
    assert objective.runner.cache.take_unsaved() is None

"""Batches without a trained token are found in advance: the steps at which reading the batch fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker_cookbook.supervised.types import SupervisedDataset

from engine.tiny import byte_tokenizer
from objectives.errors import ObjectiveError
from tasks.supervised.dataset import SupervisedSource, depends_on_order

TOKENIZER: Any = byte_tokenizer()


class Rows(SupervisedDataset):
    """Rows with the given weights, rotated by an epoch's seed; counts the batches that were read."""

    def __init__(self, weights: Sequence[float], batch_size: int) -> None:
        self._weights, self._batch_size, self._seed = weights, batch_size, 0
        self.num_reads = 0

    def get_batch(self, index: int) -> list[tinker.Datum]:
        self.num_reads += 1
        rows = [*self._weights[self._seed :], *self._weights[: self._seed]]
        return [
            types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.0, weight]})  # pyright: ignore[reportArgumentType]
            for weight in rows[index * self._batch_size : (index + 1) * self._batch_size]
        ]

    def set_epoch(self, seed: int = 0) -> None:
        self._seed = seed % len(self._weights)

    def __len__(self) -> int:
        return len(self._weights) // self._batch_size


def fails(source: SupervisedSource, step: int) -> bool:
    try:
        source.batch_at(step)
    except ObjectiveError:
        return True
    return False


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, -0.5]), min_size=2, max_size=9),
    st.integers(1, 2),
    st.integers(0, 3),
    st.integers(0, 20),
)
def test_the_steps_are_those_whose_batch_cannot_be_read(
    weights: list[float], batch_size: int, first: int, num_steps: int
) -> None:
    source = SupervisedSource(Rows(weights, batch_size), None, TOKENIZER, seed=3)
    steps = range(first, first + num_steps)
    assert source.untrained_steps(steps) == [step for step in steps if fails(source, step)]
    assert all(number == 2 * batch_size for number in source.token_counts().values())
    if 0.0 not in weights:
        assert source.pop_warnings() == {}
    assert set(steps[: source.steps_per_epoch]) <= source.token_counts().keys() <= set(steps)


def test_rows_without_a_trained_token_are_counted_once_per_epoch() -> None:
    source = SupervisedSource(Rows([1.0, 0.0, 1.0, 0.0, 1.0, 1.0], 2), None, TOKENIZER, seed=0)
    source.untrained_steps(range(9))
    (text,) = source.pop_warnings().values()
    assert text.startswith("2 of 6 training rows have no trained token: raise max_length")
    assert source.pop_warnings() == {}


@pytest.mark.parametrize(("weights", "num_reads"), [([1.0] * 6, 3), ([1.0] * 5 + [0.0], 9)])
def test_later_epochs_are_read_only_if_a_row_has_no_trained_token(weights: list[float], num_reads: int) -> None:
    rows = Rows(weights, 2)
    assert SupervisedSource(rows, None, TOKENIZER, seed=0).untrained_steps(range(9)) == []
    assert rows.num_reads == num_reads


def test_data_whose_batches_depend_on_the_order_of_reads_is_found() -> None:
    """Also if each read of the only batch has one datum with one of two values."""

    class Random(Rows):
        rng = random.Random(0)

        def get_batch(self, index: int) -> list[tinker.Datum]:
            return super().get_batch(index)[self.rng.randrange(2) :][:1]

    class SeededInEachEpoch(Random):
        def set_epoch(self, seed: int = 0) -> None:
            self.rng = random.Random(seed)

    class OnlyForwards(Rows):
        """A stream of a class of its own."""

        next = 0

        def get_batch(self, index: int) -> list[tinker.Datum]:
            assert index >= self.next
            self.next = index + 1
            return super().get_batch(index)

        def set_epoch(self, seed: int = 0) -> None:
            super().set_epoch(seed)
            self.next = 0

    assert depends_on_order(Random([1.0, 0.5], 2), seed=0)
    assert depends_on_order(Random([1.0, 0.5] * 2, 2), seed=0)
    assert depends_on_order(SeededInEachEpoch([1.0, 0.5] * 2, 2), seed=0)
    assert depends_on_order(SeededInEachEpoch([1.0, 0.5] * 90, 60), seed=0)
    assert not depends_on_order(SeededInEachEpoch([1.0, 0.5], 2), seed=0), "one batch has no order"
    assert not depends_on_order(Rows([1.0, 0.5, 1.0, 0.5], 2), seed=0)
    assert not depends_on_order(OnlyForwards([1.0, 0.5] * 90, 3), seed=0)

"""Weighted mixture of datasets: shares, positions and epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import pytest
from tinker_cookbook.supervised.data import StreamingSupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import SupervisedDataset

from blocks.errors import ConfigError
from tasks.distillation.mixture import Mixture, apportion


class Numbers(SupervisedDataset):
    """Batches of numbers, shifted by the seed of the epoch."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        self.batches, self.shift = batches, 0
        self.loaded: list[int] = []

    def get_batch(self, index: int) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.loaded.append(index)
        return [number + self.shift for number in self.batches[index]]

    def set_epoch(self, seed: int = 0) -> None:
        self.shift = 100 * seed

    def __len__(self) -> int:
        return len(self.batches)


class Problems:
    """Batches of numbers in the same order in every epoch, like those of an RL dataset."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        self.batches = batches

    def get_batch(self, index: int) -> Sequence[int]:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


def values(mixture: Mixture[int], step: int) -> list[int]:
    return [item.value for item in mixture.at(step)]


@pytest.mark.parametrize(("weights", "total", "counts"), [([1, 1], 4, [2, 2]), ([9, 1], 10, [9, 1]), ([1], 3, [3])])
def test_step_is_split_by_weight(weights: list[float], total: int, counts: list[int]) -> None:
    assert apportion(weights, total) == counts


def test_step_with_fewer_items_than_datasets_is_rejected() -> None:
    with pytest.raises(ConfigError, match="raise batch_size to at least 3"):
        apportion([1, 1, 1], 2)


def test_every_item_appears_once_per_epoch_in_order() -> None:
    wide, narrow = Numbers([[1, 2, 3, 4], [5, 6, 7, 8]]), Numbers([[11], [12], [13], [14]])
    mixture = Mixture([wide, narrow], [2.0, 1.0], 3, seed=0)
    assert len(mixture) == 4
    assert [values(mixture, step) for step in range(4)] == [[1, 2, 11], [3, 4, 12], [5, 6, 13], [7, 8, 14]]
    assert wide.loaded == [0, 1, 0, 1], "the sizes of the first and the last batch, then each batch once"


def test_a_supervised_dataset_may_have_a_short_last_batch() -> None:
    mixture = Mixture([Numbers([[1, 2, 3], [4]])], [1.0], 3, seed=0)
    assert [values(mixture, step) for step in range(2)] == [[1, 2, 3], [4]]


def test_each_epoch_is_shuffled_and_steps_can_be_read_in_any_order() -> None:
    mixture = Mixture([Numbers([[1, 2], [3, 4]])], [1.0], 2, seed=1)
    first, second = values(mixture, 1), values(mixture, 2)
    assert (first, second) == ([103, 104], [201, 202])
    assert values(mixture, 1) == first
    assert [item.position for item in mixture.at(1)] == [2, 3]


@pytest.mark.parametrize(
    ("batches", "batch_size", "steps"),
    [
        ([[1, 2, 3], [4]], 3, [[1, 2, 3], [4]]),
        ([[1, 2, 3], [4]], 2, [[1, 2], [3, 4]]),
        ([[1, 2, 3, 4, 5]], 2, [[1, 2], [3, 4], [5]]),
        ([[1, 2], [3]], 6, [[1, 2, 3, 1, 2, 3]]),  # a dataset smaller than its share starts over within the step
    ],
)
def test_items_of_a_short_last_batch_appear_once_per_epoch(
    batches: list[list[int]], batch_size: int, steps: list[list[int]]
) -> None:
    mixture = Mixture([Problems(batches)], [1.0], batch_size, seed=0)
    assert [values(mixture, step) for step in range(2 * len(mixture))] == steps * 2


@pytest.mark.parametrize("sizes", [[1, 4, 4, 4], [4, 1, 2, 4], [0, 3, 0, 0, 2, 0], [5]])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_items_of_uneven_batches_appear_once_per_epoch(sizes: list[int], batch_size: int) -> None:
    batches = [[10 * index + offset for offset in range(size)] for index, size in enumerate(sizes)]
    rows = [value for batch in batches for value in batch]
    for dataset, shift in ((Problems(batches), 0), (Numbers(batches), 100)):
        mixture = Mixture([dataset], [1.0], batch_size, seed=0)
        steps = [values(mixture, step) for step in range(2 * len(mixture))]
        assert [value for step in steps for value in step] == [*rows, *(value + shift for value in rows)]
        resumed = Mixture([dataset], [1.0], batch_size, seed=0)
        assert values(resumed, len(steps) - 1) == steps[-1]
        assert values(resumed, 0) == steps[0]


def test_epochs_may_divide_the_same_items_into_batches_of_other_sizes() -> None:
    """A builder that drops rows after shuffling; the last epochs have one item less and one more."""

    class Dropping(Numbers):
        epochs = ([[1], [2, 3]], [[3, 2], [1]], [[1, 2], []], [[3, 4], [1, 2]])

        def set_epoch(self, seed: int = 0) -> None:
            self.batches = self.epochs[seed]

    dataset = Dropping([[], []])
    mixture = Mixture([dataset], [1.0], 1, seed=0)
    values_S = [values(mixture, step)[0] for step in range(12)]
    assert values_S == [1, 2, 3, 3, 2, 1, 1, 2, 1, 3, 4, 1]
    assert [values(mixture, step)[0] for step in reversed(range(12))] == values_S[::-1]


def test_a_stream_is_read_forwards() -> None:
    rows = datasets.Dataset.from_list([{"number": number} for number in range(7)]).to_iterable_dataset()

    def open_stream(num_rows_of_3: int = 1) -> Any:
        def numbers(row: dict[str, int]) -> list[Any]:
            return [row["number"]] * (num_rows_of_3 if row["number"] == 3 else 1)

        return StreamingSupervisedDatasetFromHFDataset(rows, batch_size=2, length=7, flatmap_fn=numbers)

    mixture, resumed = (Mixture([open_stream()], [1.0], 3, seed=0) for _ in range(2))
    steps = [values(mixture, step) for step in range(4)]
    assert [len(step) for step in steps] == [3, 3, 3, 3]
    assert len({*steps[0], *steps[1]}) == len({*steps[2], *steps[3]}) == 6
    assert values(resumed, 3) == steps[3]
    dropping = Mixture([open_stream(0)], [1.0], 6, seed=0)
    with pytest.raises(ConfigError, match=r"of a dataset has the size . instead of ., but streams"):
        values(dropping, 0)


def test_a_batch_of_another_size_in_data_that_is_too_large_to_read_is_named() -> None:
    class Endless(Problems):
        def get_batch(self, index: int) -> Sequence[int]:
            return [4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3][: 1 if index == 2 else 4]

        def __len__(self) -> int:
            return 10**12

    mixture = Mixture([Endless([])], [1.0], 3, seed=0)
    assert len(mixture) == -(-4 * 10**12 // 3)
    assert values(mixture, 10**11) == [3 * 10**11 + offset for offset in range(3)]
    with pytest.raises(ConfigError, match=r"Batch 2 of epoch 0 of a dataset has the size 1 instead of 4, but streams"):
        values(mixture, 2)


def test_epoch_ends_with_the_last_items_of_the_shortest_dataset() -> None:
    mixture = Mixture([Problems([[1, 2], [3]]), Problems([[11, 12], [13, 14], [15]])], [1.0, 1.0], 4, seed=0)
    assert [values(mixture, step) for step in range(3)] == [[1, 2, 11, 12], [3, 13, 14], [1, 2, 11, 12]]


def test_dataset_smaller_than_its_share_starts_over_within_the_step() -> None:
    mixture = Mixture([Numbers([[1, 2, 3]])], [1.0], 5, seed=0)
    assert len(mixture) == 1
    assert values(mixture, 0) == [1, 2, 3, 1, 2]
    assert [item.position for item in mixture.at(1)] == [0, 1, 2, 0, 1]
    assert values(mixture, 1) == [101, 102, 103, 101, 102]


@pytest.mark.parametrize("batches", [[], [[]], [[], []]])
def test_dataset_without_items_is_rejected(batches: list[list[int]]) -> None:
    with pytest.raises(ConfigError):
        Mixture([Numbers(batches)], [1.0], 1, seed=0)

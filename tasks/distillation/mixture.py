"""Weighted mixture of datasets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tinker_cookbook.supervised.data import StreamingSupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import SupervisedDataset

from blocks.errors import ConfigError
from tasks.common.builders import data_errors
from tasks.rl.group_batches import MOST_READ

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class BatchedDataset(Protocol[T_co]):
    """Batches by index: a supervised or an RL dataset of tinker-cookbook."""

    def get_batch(self, index: int) -> Sequence[T_co]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """Item of a dataset in a step.

    Attributes:
        dataset: index of the dataset in the mixture.
        position: position of the item in the order of the epoch, which differs between epochs if the dataset shuffles.
        value: datum or group.
    """

    dataset: int
    position: int
    value: T


class Mixture(Generic[T]):
    """Weighted mixture of datasets; a batch that is larger than its dataset's share of a step lasts several steps."""

    def __init__(
        self, datasets: Sequence[BatchedDataset[T]], weights: Sequence[float], batch_size: int, seed: int
    ) -> None:
        if any(len(dataset) == 0 for dataset in datasets):
            raise ConfigError("A dataset of the mixture has no full batch: add rows or reduce its batch size.")
        self.counts = apportion(weights, batch_size)
        self._streams = [_Stream(dataset, seed) for dataset in datasets]

    def __len__(self) -> int:
        """Number of steps until the first dataset is exhausted; it may have fewer items in the last one."""
        return min(-(-stream.size // count) for stream, count in zip(self._streams, self.counts, strict=True))

    def at(self, step: int) -> list[Item[T]]:
        """Items of a step; the result depends only on the datasets, the seed and the step."""
        epoch, index = divmod(step, len(self))
        # A dataset smaller than its share starts over within the step.
        return [
            Item(number, position % stream.size, stream.item(epoch, position % stream.size))
            for number, (stream, count) in enumerate(zip(self._streams, self.counts, strict=True))
            for position in range(index * count, (index + 1) * count)
            if position < max(stream.size, count)
        ]


class _Stream(Generic[T]):
    """Items of a dataset by position.

    Builders that drop rows have batches of different sizes, which may differ between epochs. The first epoch is read in
    advance for its size, and later ones as far as they are needed. Streams, and data of more than `MOST_READ` batches,
    are not read in advance: all batches but the last one have to be as large as the first.

    Attributes:
        size: number of items of the first epoch.
    """

    def __init__(self, dataset: BatchedDataset[T], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._epoch, self._index = -1, -1
        self._batch: Sequence[T] = ()
        self._equal_starts: range | None = None
        # Positions at which the batches of each epoch start and, once all are read, the number of its items.
        self._starts: dict[int, list[int]] = {}
        # A stream has only full batches, and could not go back from its last one.
        is_stream = isinstance(dataset, StreamingSupervisedDatasetFromHFDataset)
        if is_stream or len(dataset) > MOST_READ:
            length = max(len(self._load(0, 0)), 1)
            self._equal_starts = range(0, length * len(dataset), length)
            self.size = self._equal_starts[-1] + (length if is_stream else len(self._load(0, len(dataset) - 1)))
        else:
            self.size = self._read_to(0, None)[-1]
        if self.size == 0:
            raise ConfigError("A dataset of the mixture has no rows: check the rows that its builder drops.")

    def item(self, epoch: int, position: int) -> T:
        """Item of a position, which is below `size`; an epoch of fewer items starts over after the last one."""
        starts = self._equal_starts or self._read_to(epoch, position)
        if self._equal_starts is None:
            position %= max(starts[-1], 1)
        index = bisect_right(starts, position) - 1
        batch = self._load(epoch, index)
        stop = starts[index + 1] if index + 1 < len(starts) else self.size
        if len(batch) != (expected := stop - starts[index]):
            raise ConfigError(
                f"Batch {index} of epoch {epoch} of a dataset has the size {len(batch)} instead of {expected}, but "
                f"streams and data of more than {MOST_READ} batches need batches of equal size, and all data the same "
                "batches at every read: check the rows that its builder drops."
            )
        return batch[position - starts[index]]

    def _read_to(self, epoch: int, position: int | None) -> list[int]:
        """Read the sizes of an epoch's batches up to the one with an item, all for None; return the known starts."""
        starts = self._starts.setdefault(epoch, [0])
        while len(starts) <= len(self._dataset) and (position is None or starts[-1] <= position):
            starts.append(starts[-1] + len(self._load(epoch, len(starts) - 1)))
        return starts

    def _load(self, epoch: int, index: int) -> Sequence[T]:
        """Load a batch and cache it, because a streaming dataset returns each batch only once."""
        if (epoch, index) != (self._epoch, self._index):
            with data_errors(f"Batch {index} of epoch {epoch} of a dataset"):
                dataset: object = self._dataset
                if epoch != self._epoch and isinstance(dataset, SupervisedDataset):
                    dataset.set_epoch(seed=self._seed + epoch)
                self._batch = self._dataset.get_batch(index)
            self._epoch, self._index = epoch, index
        return self._batch


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into integers in proportion to the weights, each at least 1.

    Raises:
        ConfigError: `total` is smaller than the number of weights.

    >>> apportion([3.0, 1.0], 6)
    [5, 1]
    >>> apportion([1.0, 100.0], 4)
    [1, 3]
    """
    if total < len(weights):
        raise ConfigError(
            f"batch_size={total} is smaller than the number of datasets: raise batch_size to at least {len(weights)}."
        )
    counts = [1] * len(weights)
    for _ in range(total - len(weights)):
        deficits = [weight / sum(weights) * total - count for weight, count in zip(weights, counts, strict=True)]
        counts[deficits.index(max(deficits))] += 1
    return counts

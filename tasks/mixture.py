"""Several datasets as one: each step has of each as many items as its weight says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tinker_cookbook.supervised.types import SupervisedDataset

from blocks.errors import ConfigError, reason

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Batched(Protocol[T_co]):
    """A dataset of tinker-cookbook's, supervised or of groups: batches by their index."""

    def get_batch(self, index: int) -> Sequence[T_co]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """What a step has of a dataset.

    Attributes:
        dataset: which one, by its place in the mixture.
        position: of the item in it; the same in every epoch.
        value: a datum or a group.
    """

    dataset: int
    position: int
    value: T


class Mixture(Generic[T]):
    """Datasets mixed by weight. A batch of one that is larger than its share lasts for several steps."""

    def __init__(self, datasets: Sequence[Batched[T]], weights: Sequence[float], batch_size: int, seed: int) -> None:
        if any(len(each) == 0 for each in datasets):
            raise ConfigError("A dataset has no whole batch: give it more rows or a smaller batch size.")
        self.counts = apportion(weights, batch_size)
        self._streams = [_Stream(each, seed) for each in datasets]

    def __len__(self) -> int:
        """Steps until the first of the datasets ends."""
        return max(1, min(each.size // count for each, count in zip(self._streams, self.counts, strict=True)))

    def at(self, step: int) -> list[Item[T]]:
        """The items of a step: the same for the same datasets, seed and step."""
        epoch, index = divmod(step, len(self))
        return [
            Item(number, position % stream.size, stream.item(epoch, position % stream.size))
            for number, (stream, count) in enumerate(zip(self._streams, self.counts, strict=True))
            for position in range(index * count, (index + 1) * count)
        ]


class _Stream(Generic[T]):
    """The items of a dataset one by one, all of its batches as long as the first."""

    def __init__(self, dataset: Batched[T], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._epoch, self._index = -1, -1
        self._batch: Sequence[T] = ()
        self._length = len(self._at(0, 0))
        self.size = self._length * len(dataset)

    def item(self, epoch: int, position: int) -> T:
        index, place = divmod(position, self._length)
        batch = self._at(epoch, index)
        return batch[place % len(batch)]  # the last batch may be shorter

    def _at(self, epoch: int, index: int) -> Sequence[T]:
        """A batch, held because a streaming dataset cannot be asked for the same one twice."""
        if (epoch, index) != (self._epoch, self._index):
            try:
                if epoch != self._epoch:
                    _shuffle(self._dataset, self._seed + epoch)
                self._batch = self._dataset.get_batch(index)
            except Exception as error:  # a dataset is somebody else's code: whatever it raises is about its data
                raise ConfigError(
                    f"Batch {index} of epoch {epoch} of a dataset could not be read ({reason(error)}): check its rows."
                ) from error
            if not self._batch:
                raise ConfigError(f"Batch {index} of a dataset is empty: check its rows.")
            self._epoch, self._index = epoch, index
        return self._batch


def _shuffle(dataset: object, seed: int) -> None:
    """Begin an epoch, where a dataset has one."""
    if isinstance(dataset, SupervisedDataset):
        dataset.set_epoch(seed=seed)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """`total` by weight in whole numbers, each at least 1 and as near to its share as they can be.

    Raises:
        ConfigError: there are more weights than `total`.

    >>> apportion([3.0, 1.0], 6)
    [5, 1]
    >>> apportion([1.0, 100.0], 4)
    [1, 3]
    """
    if total < len(weights):
        raise ConfigError(
            f"A step has {total} items of {len(weights)} datasets, and each needs one: raise batch_size to at least "
            f"{len(weights)}."
        )
    counts = [1] * len(weights)
    for _ in range(total - len(weights)):
        # To whichever is furthest below its share.
        lack = [weight / sum(weights) * total - count for weight, count in zip(weights, counts, strict=True)]
        counts[lack.index(max(lack))] += 1
    return counts

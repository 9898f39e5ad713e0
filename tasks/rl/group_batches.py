"""Split of an RL dataset's groups into steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from blocks.errors import ConfigError
from tasks.common.builders import data_errors

# Most batches that are read in advance for their sizes.
MOST_READ = 1000


class GroupBatches:
    """Groups of a dataset by step.

    Attributes:
        num_trained: groups per step that are trained on; with over-sampling, a step has more groups than that.
        num_refilled: groups that `refill` has taken so far; later steps start this many groups further on in the data.
    """

    num_refilled: int = 0

    def __init__(
        self,
        dataset: RLDataset,
        groups_per_batch: int | None,
        *,
        can_refill: bool = False,
        num_parts: int = 1,
        oversampling_factor: float = 1.0,
    ) -> None:
        """Split the groups into steps of `groups_per_batch` consecutive groups; None keeps the dataset's own batches.

        Builders that drop rows have batches of different sizes. In data of more than `MOST_READ` batches, only the
        first and the last one are read, and all but the last one have to be as large as the first.

        Args:
            can_refill: allow `refill`; every step then has the same number of groups.
            num_parts: updates and minibatches of a step; if a batch has fewer groups, every step has the same number.
            oversampling_factor: groups that a step starts per group that it trains on; above 1, every step has the same
                number of groups.

        Raises:
            ConfigError: the dataset has no group, or fewer groups than a step starts.
        """
        self._dataset = dataset
        self._last: tuple[int, Sequence[EnvGroupBuilder]] | None = None
        if len(dataset) <= MOST_READ:
            sizes = [len(self._read(index)) for index in range(len(dataset))]
            self._starts: Sequence[int] = [0, *accumulate(sizes[:-1])]
        else:
            sizes = [len(self._read(index)) for index in (0, len(dataset) - 1)]
            self._starts = range(0, max(sizes[0], 1) * len(dataset), max(sizes[0], 1))
        self._size = max(sizes, default=0)
        if self._size == 0:
            raise ConfigError("The environments have no group: check the rows that their builder drops.")
        self._num_groups = self._starts[-1] + sizes[-1]
        has_equal_steps = can_refill or min(sizes) < num_parts
        self._groups_per_batch = groups_per_batch or (self._size if has_equal_steps else None)
        self.num_trained = groups_per_batch or self._size
        if self._num_groups < (groups_per_batch or 1):
            raise ConfigError(
                f"groups_per_batch={groups_per_batch} exceeds the {self._num_groups} groups of the environments: "
                "lower it."
            )
        if oversampling_factor > 1:
            self._groups_per_batch = num_oversampled(self.num_trained, oversampling_factor)
            if self._num_groups < self._groups_per_batch:
                raise ConfigError(
                    f"rollout.oversampling_factor={oversampling_factor:g} starts {self._groups_per_batch} groups for "
                    f"the {self.num_trained} of a step, but the environments have {self._num_groups}: lower it, or "
                    "add problems."
                )

    @property
    def num_steps(self) -> int:
        """Number of steps per epoch."""
        return self._num_groups // self._groups_per_batch if self._groups_per_batch else len(self._dataset)

    @property
    def groups_per_batch(self) -> int:
        """Number of groups per step; without a fixed number, some steps may have fewer."""
        return self._groups_per_batch or self._size

    def at(self, step: int) -> Sequence[EnvGroupBuilder]:
        """Return the groups of a step; after the last group the dataset starts over."""
        if self._groups_per_batch is None:
            return self._batch(step % len(self._dataset))
        return self._take(step * self._groups_per_batch, self._groups_per_batch)

    def refill(self, step: int, num_groups: int) -> Sequence[EnvGroupBuilder]:
        """Take the next groups of the data, after those of the step and of all refills so far."""
        assert self._groups_per_batch is not None
        groups = self._take((step + 1) * self._groups_per_batch, num_groups)
        self.num_refilled += num_groups
        return groups

    def _take(self, first: int, num_groups: int) -> Sequence[EnvGroupBuilder]:
        numbers = range(first + self.num_refilled, first + self.num_refilled + num_groups)
        return [self._group(number % self._num_groups) for number in numbers]

    def _group(self, number: int) -> EnvGroupBuilder:
        index = bisect_right(self._starts, number) - 1
        return self._batch(index)[number - self._starts[index]]

    def _batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Load a batch and cache it, because a step may need several of its groups."""
        if self._last is None or self._last[0] != index:
            batch = self._read(index)
            self._check_size(index, len(batch))
            self._last = (index, batch)
        return self._last[1]

    def _read(self, index: int) -> Sequence[EnvGroupBuilder]:
        with data_errors(f"Batch {index} of the environments"):
            return self._dataset.get_batch(index)

    def _check_size(self, index: int, size: int) -> None:
        """Raise a ConfigError if a batch has no group, or another number of groups than steps of equal size need."""
        if self._groups_per_batch is None:
            if size == 0:
                raise ConfigError(
                    f"Batch {index} of the environments has no group: check the rows that their builder drops."
                )
            return
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else self._num_groups
        if size != (expected := stop - self._starts[index]):
            raise ConfigError(
                f"Batch {index} of the environments has the size {size} instead of {expected}, which steps of equal "
                f"size allow in data of at most {MOST_READ} batches that are the same at every read: check the rows "
                "that their builder drops, or remove groups_per_batch, refill_rounds and oversampling_factor."
            )


def num_oversampled(num_groups: int, factor: float) -> int:
    """Return how many groups a step starts so that it can train on `num_groups`.

    >>> num_oversampled(8, 1.25), num_oversampled(10, 1.1), num_oversampled(2, 1.1)
    (10, 11, 3)
    """
    return math.ceil(round(num_groups * factor, 6))


def split(num_groups: int, num_parts: int) -> list[range]:
    """Split groups into consecutive parts of nearly equal size.

    Raises:
        ConfigError: `num_parts` exceeds `num_groups`.

    >>> split(5, 2)
    [range(0, 2), range(2, 5)]
    """
    if num_parts > num_groups:
        raise ConfigError(
            f"A step has {num_groups} groups, but num_minibatches times num_substeps is {num_parts}: lower one of "
            "them, or raise groups_per_batch."
        )
    bounds = [num_groups * part // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]

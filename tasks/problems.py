"""The groups of environments that each step plays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from blocks.errors import ConfigError


class Problems:
    """The groups of a dataset, by step."""

    def __init__(self, dataset: RLDataset, groups_per_batch: int | None) -> None:
        """Take so many groups a step, of several batches of the dataset or a part of one; None takes its batches."""
        self._dataset = dataset
        self._size = len(dataset.get_batch(0))
        self._num_groups = self._size * (len(dataset) - 1) + len(dataset.get_batch(len(dataset) - 1))
        self._groups_per_batch = groups_per_batch
        if self._num_groups < (groups_per_batch or 1):
            raise ConfigError(
                f"The environments have {self._num_groups} groups and groups_per_batch is {groups_per_batch}: lower it."
            )
        self._held: tuple[int, Sequence[EnvGroupBuilder]] | None = None

    @property
    def num_steps(self) -> int:
        """Of one epoch."""
        return self._num_groups // self._groups_per_batch if self._groups_per_batch else len(self._dataset)

    @property
    def groups_per_batch(self) -> int:
        """Of a step; the last one of an epoch may have fewer where the dataset's last batch has."""
        return self._groups_per_batch or self._size

    def of_step(self, step: int) -> Sequence[EnvGroupBuilder]:
        """The groups of a step; behind the last one the dataset begins again."""
        if self._groups_per_batch is None:
            return self._batch(step % len(self._dataset))
        first = step * self._groups_per_batch
        return [self._group(number % self._num_groups) for number in range(first, first + self._groups_per_batch)]

    def _group(self, number: int) -> EnvGroupBuilder:
        return self._batch(number // self._size)[number % self._size]

    def _batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The last one is held, because a step may need several of its groups."""
        if self._held is None or self._held[0] != index:
            self._held = (index, self._dataset.get_batch(index))
        return self._held[1]


def split(num_groups: int, num_parts: int) -> list[range]:
    """So many groups in parts that are as equal as can be.

    Raises:
        ConfigError: there are more parts than groups.

    >>> split(5, 2)
    [range(0, 2), range(2, 5)]
    """
    if num_parts > num_groups:
        raise ConfigError(
            f"A step has {num_groups} groups, and num_minibatches times num_substeps is {num_parts}: lower one of them."
        )
    bounds = [num_groups * part // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]

"""Supervised data of a run: any tinker-cookbook dataset builder, as a pure function from step to packed batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import tinker
from tinker_cookbook.supervised.data import StreamingSupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch
from tasks.common.builders import NO_RESOURCES, build, data_errors
from tasks.common.task import Pending, retried_task, submit
from tasks.training.batch_source import BatchSource
from tasks.training.datums import pack_datums

# Datums that are compared between two reads. A random choice with two outcomes per datum, such as the order of two
# answers, is equal in both with the probability 2 ** -64.
_NUM_COMPARED = 64

_Content = tuple[tinker.ModelInput, dict[str, object]]


class SupervisedSource(BatchSource):
    """Source of supervised batches."""

    def __init__(
        self, train: SupervisedDataset, test: SupervisedDataset | None, tokenizer: Tokenizer, seed: int
    ) -> None:
        """Check that the training data has a batch."""
        super().__init__()
        if len(train) == 0:
            raise ConfigError("The training data has no full batch: add rows or reduce batch_size.")
        self.train, self.test, self.tokenizer, self.seed = train, test, tokenizer, seed
        self._epoch: int | None = None
        self._token_counts: dict[int, int] = {}
        self._last: tuple[int, Batch] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train)

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Start loading the batch of a step."""
        return [submit(load_batch, self, step)]

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step; it depends only on the data, the seed and the step.

        The last batch is cached: callers may request a step twice, but a streaming dataset returns each index once.
        """
        if self._last is None or self._last[0] != step:
            self._last = (step, pack_datums(self._read(step), self.tokenizer))
        return self._last[1]

    def untrained_steps(self, steps: range) -> Sequence[int]:
        """Return the steps whose batches have no token of non-zero weight.

        If every row of an epoch has such a token, later epochs are not read. A stream can be read only once and is not
        checked.
        """
        if isinstance(self.train, StreamingSupervisedDatasetFromHFDataset):
            return ()
        untrained, num_complete = list[int](), 0
        trained_in_first_epoch: list[bool] = []
        for step in steps:
            if step % len(self.train) == 0:
                num_complete = 0
            datums = self._read(step)
            self._token_counts[step] = sum(datum.model_input.length for datum in datums)
            trained = [_has_weight(datum) for datum in datums]
            if step // len(self.train) == steps.start // len(self.train):
                trained_in_first_epoch += trained
            if not any(trained):
                untrained.append(step)
            num_complete += all(trained)
            if num_complete == len(self.train):
                break
        if num_untrained := trained_in_first_epoch.count(False):
            self._warnings["untrained_rows"] = (
                f"{num_untrained} of {len(trained_in_first_epoch)} training rows have no trained token: raise "
                "max_length, which may have cut them off, or remove the rows."
            )
        self._epoch = None  # the next read sets the epoch again, because a dataset may count the batches it returns
        return untrained

    def token_counts(self) -> Mapping[int, int]:
        return self._token_counts

    def _read(self, step: int) -> list[tinker.Datum]:
        epoch, index = divmod(step, len(self.train))
        with data_errors(f"Batch {index} of epoch {epoch}"):
            if epoch != self._epoch:
                self.train.set_epoch(seed=self.seed + epoch)
                self._epoch = epoch
            return self.train.get_batch(index)


def _has_weight(datum: tinker.Datum) -> bool:
    """Return False if no token has a weight; a datum without the input `weights` is rejected when it is packed."""
    weights = datum.loss_fn_inputs.get("weights")
    return weights is None or any(weights.data)


def depends_on_order(dataset: SupervisedDataset, seed: int) -> bool:
    """Return whether batches depend on the batches read before; a stream is not checked.

    The first batches of the first epochs are read twice, the second time without the batch before them, so that a
    generator is found that is seeded once or in each epoch.
    """
    with data_errors("The training data"):
        first = int(len(dataset) > 1)
    if isinstance(dataset, StreamingSupervisedDatasetFromHFDataset):
        return False
    num_compared = 0
    for epoch in range(_NUM_COMPARED):
        batches: list[list[_Content]] = []
        for batch in _read_epoch(dataset, seed, epoch, 0):
            batches.append(batch)
            if len(batches) > _NUM_COMPARED or sum(map(len, batches[first:])) >= _NUM_COMPARED:
                break
        if list(islice(_read_epoch(dataset, seed, epoch, first), len(batches) - first)) != batches[first:]:
            return True
        num_compared += sum(map(len, batches[first:]))
        if num_compared >= _NUM_COMPARED:
            break
    return False


def _read_epoch(dataset: SupervisedDataset, seed: int, epoch: int, first: int) -> Iterator[list[_Content]]:
    """Read the contents of an epoch's batches, without those before the batch `first`."""
    for index in range(first, len(dataset)):
        with data_errors(f"Batch {index} of epoch {epoch}"):
            if index == first:
                dataset.set_epoch(seed=seed + epoch)
            datums = dataset.get_batch(index)
        # The equality of `TensorData` is that of objects.
        yield [
            (datum.model_input, {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()})
            for datum in datums
        ]


class _InOrder(SupervisedDataset):
    """Dataset whose batches depend on the batches read before.

    Each batch is read after all earlier ones of its epoch and of earlier epochs, as in tinker-cookbook's loop.
    """

    def __init__(self, dataset: SupervisedDataset, reopen: Callable[[], SupervisedDataset], seed: int) -> None:
        """Prepare to read.

        Args:
            dataset: the data, of which no batch has been read.
            reopen: opens the data anew.
            seed: seed of the first epoch; that of each later epoch is larger by 1.
        """
        self._dataset, self._reopen, self._seed = dataset, reopen, seed
        self._epoch = 0
        self._next: int | None = 0  # number of batches that were read since the data was opened

    def get_batch(self, index: int) -> list[tinker.Datum]:
        number = self._epoch * len(self) + index
        first, self._next = self._next, None  # a read that fails may have changed the dataset
        if first is None or number < first:
            self._dataset, first = self._reopen(), 0
        for earlier in range(first, number):
            self._read(earlier)
        datums = self._read(number)
        self._next = number + 1
        return datums

    def set_epoch(self, seed: int = 0) -> None:
        self._epoch = seed - self._seed

    def __len__(self) -> int:
        return len(self._dataset)

    def _read(self, number: int) -> list[tinker.Datum]:
        epoch, index = divmod(number, len(self))
        with data_errors(f"Batch {index} of epoch {epoch}"):
            if index == 0:
                self._dataset.set_epoch(seed=self._seed + epoch)
            return self._dataset.get_batch(index)


class _ReadDataset(SupervisedDataset):
    """Dataset whose batches are read when it is constructed."""

    def __init__(self, dataset: SupervisedDataset) -> None:
        with data_errors("The held-out data"):
            self._batches = [dataset.get_batch(index) for index in range(len(dataset))]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)


def open_datasets(
    builder: str,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    seed: int,
    resources: Mapping[str, Any] = NO_RESOURCES,
) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    """Construct a `SupervisedDatasetBuilder` by import path and call it for its training and held-out data.

    If its batches depend on the batches read before, as with a random generator that all rows share, it is called again
    whenever an earlier batch is read.

    Args:
        resources: open resources of the run for builders with matching parameters; see `build`.

    Raises:
        ConfigError: the builder does not exist, rejects its parameters or cannot read its data.
    """

    def open_data() -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return build("data", builder, params, tokenizer, lambda instance: instance(), resources)

    def open_in_order() -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = open_data()
        return train, None if test is None else _ReadDataset(test)  # tinker-cookbook reads the held-out data first

    train, test = open_data()
    if not depends_on_order(train, seed):
        return train, test
    train, test = open_in_order()
    return _InOrder(train, lambda: open_in_order()[0], seed), test


def build_dataset(
    builder: str,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    seed: int,
    resources: Mapping[str, Any] = NO_RESOURCES,
) -> SupervisedSource:
    """Open the datasets of a builder as a source; see `open_datasets`.

    Raises:
        ConfigError: as `open_datasets`, or the training data has no full batch.
    """
    return SupervisedSource(*open_datasets(builder, params, tokenizer, seed, resources), tokenizer, seed)


@retried_task(name="batch", task_run_name="batch-{step}")
def load_batch(source: SupervisedSource, step: int) -> Batch:
    """Load the batch of a step."""
    return source.batch_at(step)

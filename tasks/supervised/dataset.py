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
        self,
        train: SupervisedDataset,
        test: SupervisedDataset | None,
        tokenizer: Tokenizer,
        seed: int,
        reopen: Callable[[], SupervisedDataset] | None = None,
    ) -> None:
        """Check that the training data has a batch.

        Args:
            reopen: opens the training data anew, for data whose batches depend on the batches read before. Each batch
                is then read after all earlier ones, as in tinker-cookbook's loop. None for other data.
        """
        super().__init__()
        with data_errors("The training data"):
            num_batches = len(train)
        if num_batches == 0:
            raise ConfigError("The training data has no full batch: add rows or reduce batch_size.")
        self.train, self.test, self.tokenizer, self.seed = train, test, tokenizer, seed
        self._reopen = reopen
        self._next: int | None = None  # step whose batch follows those read since the data was opened anew
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
        if self._reopen is None:
            return self._get(step)
        first, self._next = self._next, None  # a read that fails may have changed the dataset
        if first is None or step < first:
            self.train, self._epoch, first = self._reopen(), None, 0
        for earlier in range(first, step):
            self._get(earlier)
        datums = self._get(step)
        self._next = step + 1
        return datums

    def _get(self, step: int) -> list[tinker.Datum]:
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
    if isinstance(dataset, StreamingSupervisedDatasetFromHFDataset):
        return False
    first, num_compared = int(len(dataset) > 1), 0
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


class _ReadDataset(SupervisedDataset):
    """Dataset whose batches are read when it is constructed."""

    def __init__(self, dataset: SupervisedDataset) -> None:
        with data_errors("The held-out data"):
            self._batches = [dataset.get_batch(index) for index in range(len(dataset))]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)


def build_dataset(
    builder: str,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    seed: int,
    resources: Mapping[str, Any] = NO_RESOURCES,
) -> SupervisedSource:
    """Construct a `SupervisedDatasetBuilder` by import path and call it.

    If its batches depend on the batches read before, as with a random generator that all rows share, it is called again
    for each pass over the data.

    Args:
        resources: open resources of the run for builders with matching parameters; see `build`.

    Raises:
        ConfigError: the builder does not exist, rejects its parameters, cannot read its data or has no full batch.
    """

    def open_data() -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return build("data", builder, params, tokenizer, lambda instance: instance(), resources)

    def open_in_order() -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = open_data()
        return train, None if test is None else _ReadDataset(test)  # tinker-cookbook reads the held-out data first

    train, test = open_data()
    source = SupervisedSource(train, test, tokenizer, seed)
    if not depends_on_order(train, seed):
        return source
    return SupervisedSource(*open_in_order(), tokenizer, seed, lambda: open_in_order()[0])


@retried_task(name="batch", task_run_name="batch-{step}")
def load_batch(source: SupervisedSource, step: int) -> Batch:
    """Load the batch of a step."""
    return source.batch_at(step)

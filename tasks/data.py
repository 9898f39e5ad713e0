"""The data of a run: any tinker-cookbook dataset builder, as a pure function from step to packed batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import chz
import tinker
import torch
from chz.blueprint import Castable, ExtraneousBlueprintArg
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch, pack
from objectives.labels import read_labels, without_labels
from tasks.given import given
from tasks.options import Pending, retried_task, submit
from tasks.source import Source

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Datums:
    """The service's own datums of a batch, in order. Not a list, because Prefect walks every token of a list."""

    __slots__ = ("_datums",)

    def __init__(self, datums: Sequence[tinker.Datum]) -> None:
        self._datums = tuple(datums)

    def __iter__(self) -> Iterator[tinker.Datum]:
        return iter(self._datums)


class DataSource(Source):
    """The datasets of a run and the tokenizer they were made with."""

    def __init__(
        self, train: SupervisedDataset, test: SupervisedDataset | None, tokenizer: Tokenizer, seed: int
    ) -> None:
        if len(train) == 0:
            raise ConfigError(
                "The data source has no whole batch: give it more rows or a batch_size not above their number."
            )
        self.train, self.test, self.tokenizer, self.seed = train, test, tokenizer, seed
        self._epoch: int | None = None
        self._held: tuple[int, Batch] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train)

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """`batch_at` as a task, run ahead of the step that needs it."""
        return [submit(load_batch, self, step)]

    def batch_at(self, step: int) -> Batch:
        """The batch of a step: the same for the same data, seed and step, however the run came there.

        The last batch is held, because a streaming dataset cannot be asked for the same index twice.
        """
        if self._held is None or self._held[0] != step:
            epoch, index = divmod(step, len(self.train))
            try:
                if epoch != self._epoch:
                    self.train.set_epoch(seed=self.seed + epoch)
                    self._epoch = epoch
                datums = self.train.get_batch(index)
            except Exception as error:  # a dataset is somebody else's code: whatever it raises is about its data
                raise ConfigError(
                    f"Batch {index} of epoch {epoch} could not be read ({type(error).__name__}: {_one_line(error)}): "
                    "check the rows of the data file."
                ) from error
            self._held = (step, pack_datums(datums, self.tokenizer))
        return self._held[1]


def build_dataset(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer, seed: int, of_run: Mapping[str, Any] = NOTHING
) -> DataSource:
    """Construct a `SupervisedDatasetBuilder` by import path and call it.

    Args:
        of_run: what the run holds open, for builders that take it; see `build`.

    Raises:
        ConfigError: no such builder, wrong parameters, or data that it cannot read.
    """
    train, test = build("data", builder, params, tokenizer, lambda made: made(), of_run)
    return DataSource(train, test, tokenizer, seed)


def build(
    field: str,
    builder: str,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    call: Callable[[Any], tuple[Any, Any]],
    of_run: Mapping[str, Any] = NOTHING,
) -> tuple[Any, Any]:
    """The datasets of a builder, to train and to test on, by its import path.

    `params` may nest; a tokenizer's name or a renderer that they leave out is that of the model that is trained, and
    what they leave out of the run is the run's own.

    Args:
        field: the field of the config that names it.
        call: what makes the datasets of the builder.
        of_run: what the run holds open, by the names of parameters that take it: its `session` on the service, the
            `directory` of its record and its `base_model`.

    Raises:
        ConfigError: no such builder, wrong parameters, or data that it cannot read.
    """
    target = import_object(builder, f"{field}.builder")
    try:
        written = chz.Blueprint(target).apply(_flatten(params), layer_name=f"{field}.params")
        return call(_filled(written, given(tokenizer, of_run)).make())
    except FileNotFoundError as error:
        raise ConfigError(
            f"The data file {error.filename or error} does not exist: set {field}.params to a file that does."
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # a builder is somebody else's code: whatever it raises is about its data
        raise ConfigError(
            f"The data source {builder} could not be read ({type(error).__name__}: {_one_line(error)}): "
            f"check {field}.params and the file it names."
        ) from error


def import_object(path: str, field: str) -> Any:
    """The object at `package.module:name` (or `package.module.name`).

    Raises:
        ConfigError: there is no such module or name.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{field} is {path!r}, which cannot be imported ({error}): give an import path such as package.module:Name."
        ) from error


def pack_datums(datums: list[tinker.Datum], tokenizer: Tokenizer) -> Batch:
    """Pack the service's datums along their tokens; the datums themselves ride along, without their labels.

    Raises:
        ConfigError: a datum lacks `target_tokens` or `weights`, or has several targets per position.
    """
    targets_D, weights_D = [], []
    for index, datum in enumerate(datums):
        missing = {"target_tokens", "weights"} - set(datum.loss_fn_inputs)
        if missing:
            raise ConfigError(
                f"Datum {index} of a batch has no {' and no '.join(sorted(missing))}, which supervised training needs: "
                "check the dataset builder."
            )
        targets, weights = (datum.loss_fn_inputs[key].to_torch() for key in ("target_tokens", "weights"))
        if targets.ndim != 1 or targets.shape != weights.shape:
            raise ConfigError(
                f"Datum {index} of a batch has target_tokens of shape {tuple(targets.shape)} and weights of shape "
                f"{tuple(weights.shape)} where one axis of equal length is expected: check the dataset builder."
            )
        targets_D.append(targets.to(torch.int64))
        weights_D.append(weights.to(torch.float32))
    target_tokens_DT, offsets_D = pack(targets_D)
    texts_D = tuple(
        str(tokenizer.decode(targets[weights != 0].tolist()))
        for targets, weights in zip(targets_D, weights_D, strict=True)
    )
    return Batch(
        target_tokens_DT,
        pack(weights_D)[0],
        offsets_D,
        texts_D,
        datums=Datums([without_labels(datum) for datum in datums]),
        labels_D=read_labels(datums),
    )


@retried_task(name="batch", task_run_name="batch-{step}")
def load_batch(source: DataSource, step: int) -> Batch:
    """`DataSource.batch_at` as a task."""
    return source.batch_at(step)


def _filled(written: chz.Blueprint[Any], defaults: Mapping[str, Any]) -> chz.Blueprint[Any]:
    """A blueprint with those of the defaults that it has parameters for, where it says nothing of them."""
    fitting: dict[str, Any] = {}
    for name, value in defaults.items():
        # Which parameters there are depends on which builders are nested in it.
        with suppress(ExtraneousBlueprintArg):
            written.clone().apply({name: value}, strict=True)
            fitting[name] = value
    return chz.Blueprint(written.target).apply(fitting, layer_name="the model's").apply(written)


def _flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = Castable(value) if isinstance(value, str) else value
    return flat


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

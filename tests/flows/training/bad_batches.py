"""GSM8K with some bad batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import chz
import tinker
import torch
from tinker import types
from tinker_cookbook.supervised.types import SupervisedDataset

from examples.gsm8k import Gsm8kBuilder
from objectives.batch import Batch, Outputs
from objectives.term import regularizer


@regularizer("test_nan_at_spikes")
def nan_at_spikes(outputs: Outputs, batch: Batch) -> torch.Tensor:
    """NaN for batches with the weights of `spikes`."""
    return -outputs.logprobs_DT * (torch.nan if float(batch.weights_DT.sum()) > 10 else 1.0)


EVALUATED: list[Batch] = []


@regularizer("test_nan_at_second_candidates", "scored")
def nan_at_second_candidates(outputs: Outputs, batch: Batch) -> torch.Tensor:
    """Position in the batch; NaN for the second batch after `EVALUATED` was cleared."""
    EVALUATED.append(batch)
    return torch.arange(batch.num_datums) * (torch.nan if len(EVALUATED) == 2 else 1.0)


@chz.chz
class BadBatchBuilder(Gsm8kBuilder):
    """Bad batches by index: `not_finite` ones have a NaN weight, `spikes` fifty times the weights, `untrained` none."""

    not_finite: Sequence[int] = ()
    spikes: Sequence[int] = ()
    untrained: Sequence[int] = ()

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        train, test = super().__call__()
        factors = dict.fromkeys(self.spikes, 50.0) | dict.fromkeys(self.not_finite, float("nan"))
        return _BadBatches(train, factors, self.untrained), test


class _BadBatches(SupervisedDataset):
    def __init__(self, good: SupervisedDataset, factors: dict[int, float], untrained: Sequence[int]) -> None:
        self._good, self._factors, self._untrained = good, factors, untrained

    def get_batch(self, index: int) -> list[tinker.Datum]:
        first, *others = self._good.get_batch(index)
        if index in self._untrained:
            return [_weighted(datum, 0.0) for datum in (first, *others)]
        return [_weighted(first, self._factors.get(index, 1.0)), *others]

    def set_epoch(self, seed: int = 0) -> None:
        self._good.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._good)


def _weighted(datum: tinker.Datum, factor: float) -> tinker.Datum:
    weights = datum.loss_fn_inputs["weights"].to_torch()
    changed = types.TensorData.from_torch((weights * factor).to(torch.float32))
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weights": changed})

"""GSM8K that notes when each batch is asked for: the same clock for two training loops in two processes."""

from __future__ import annotations

import time
from pathlib import Path

import chz
import tinker
from tinker_cookbook.supervised.types import SupervisedDataset

from examples.gsm8k import Gsm8kBuilder


@chz.chz
class TimedGsm8kBuilder(Gsm8kBuilder):
    """`Gsm8kBuilder` that appends a line of `time.monotonic()` to the file `times` for every training batch."""

    times: str

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        train, test = super().__call__()
        return _Timed(train, Path(self.times)), test


class _Timed(SupervisedDataset):
    def __init__(self, dataset: SupervisedDataset, times: Path) -> None:
        self._dataset, self._times = dataset, times

    def get_batch(self, index: int) -> list[tinker.Datum]:
        with self._times.open("a") as file:
            file.write(f"{time.monotonic()}\n")
        return self._dataset.get_batch(index)

    def set_epoch(self, seed: int = 0) -> None:
        self._dataset.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._dataset)

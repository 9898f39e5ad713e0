"""Datasets that record the time of each batch request, so that two training loops are measured by the same clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz
import tinker
from tinker_cookbook.supervised.types import SupervisedDataset

from examples.gsm8k import Gsm8kBuilder
from tasks.distillation.prompts import PromptGroup, Prompts, QuestionsBuilder


@chz.chz
class TimedGsm8kBuilder(Gsm8kBuilder):
    """`Gsm8kBuilder` that appends a line of `time.monotonic()` to the file `times` for every training batch."""

    times: str

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        train, test = super().__call__()
        return _TimedDataset(train, Path(self.times)), test


class _TimedDataset(SupervisedDataset):
    def __init__(self, dataset: SupervisedDataset, times: Path) -> None:
        self._dataset, self._times = dataset, times

    def get_batch(self, index: int) -> list[tinker.Datum]:
        _record_time(self._times)
        return self._dataset.get_batch(index)

    def set_epoch(self, seed: int = 0) -> None:
        self._dataset.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._dataset)


@chz.chz
class TimedQuestionsBuilder(QuestionsBuilder):
    """`QuestionsBuilder` that appends a line of `time.monotonic()` to the file `times` for every training batch."""

    times: str

    async def __call__(self) -> tuple[Prompts, Prompts | None]:
        train, test = await super().__call__()
        return _TimedQuestions(train.groups, train.batch_size, Path(self.times)), test


@dataclass(frozen=True)
class _TimedQuestions(Prompts):
    times: Path

    def get_batch(self, index: int) -> Sequence[PromptGroup]:
        _record_time(self.times)
        return super().get_batch(index)


def _record_time(times: Path) -> None:
    with times.open("a") as file:
        file.write(f"{time.monotonic()}\n")

"""Questions that note when each batch is asked for: the same clock for two loops of distillation in two processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from tasks.questions import QuestionGroup, Questions, QuestionsBuilder


@chz.chz
class TimedQuestionsBuilder(QuestionsBuilder):
    """`QuestionsBuilder` that appends a line of `time.monotonic()` to the file `times` for every training batch."""

    times: str

    async def __call__(self) -> tuple[Questions, Questions | None]:
        train, test = await super().__call__()
        return _Timed(train.groups, train.batch_size, Path(self.times)), test


@dataclass(frozen=True)
class _Timed(Questions):
    times: Path

    def get_batch(self, index: int) -> Sequence[QuestionGroup]:
        with self.times.open("a") as file:
            file.write(f"{time.monotonic()}\n")
        return super().get_batch(index)

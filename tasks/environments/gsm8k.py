"""GSM8K, or any questions with a number as their answer, from JSONL files."""

from __future__ import annotations

from functools import partial

import chz
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import RLDataset

from tasks.environments.groups import GroupsBuilder, MakeEnv
from tasks.graders import same_number
from tasks.rows import read_rows

INSTRUCTION = "Give the final number alone on the last line, after ####."


class Gsm8kEnv(ProblemEnv):
    """One question: 1 for the right final number, less `format_coef` where the answer does not end by `####`."""

    def __init__(self, row: dict[str, str], instruction: str, renderer: Renderer, format_coef: float) -> None:
        super().__init__(renderer, format_coef=format_coef)
        self._row, self._instruction = row, instruction

    def get_question(self) -> str:
        return f"{self._row['question']}\n{self._instruction}"

    def check_answer(self, sample_str: str) -> bool:
        return same_number(sample_str, self._row["answer"])

    def check_format(self, sample_str: str) -> bool:
        *_, last = sample_str.strip().splitlines() or [""]
        return last.startswith("####")

    def get_reference_answer(self) -> str:
        return self._row["answer"]


@chz.chz
class Gsm8kBuilder(GroupsBuilder):
    """The questions of JSONL files with `question` and `answer`.

    Attributes:
        train_path: what is trained on.
        test_path: what is held out; None for nothing.
        limit: take so many questions of each file only, the first ones.
        instruction: what each question is asked with.
        format_coef: what an answer loses that does not end as asked, or has no end.
    """

    train_path: str
    test_path: str | None = None
    limit: int | None = None
    instruction: str = INSTRUCTION
    format_coef: float = 0.1

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        test = self._problems(self.test_path) if self.test_path else []
        return self.training(self._problems(self.train_path), "gsm8k"), self.held_out(test, "gsm8k")

    def _problems(self, path: str) -> list[MakeEnv]:
        renderer = self.renderer()
        rows = read_rows(path, ("question", "answer"), self.limit)
        return [partial(Gsm8kEnv, row, self.instruction, renderer, self.format_coef) for row in rows]

"""GSM8K, or any questions with numeric answers, from JSONL files."""

from __future__ import annotations

from functools import partial

import chz
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import RLDataset

from tasks.common.graders import same_number
from tasks.common.jsonl import read_rows
from tasks.rl.environments.groups import GroupsBuilder, MakeEnv

INSTRUCTION = "Give the final number alone on the last line, after ####."


class Gsm8kEnv(ProblemEnv):
    """One question: reward 1 for the correct final number, minus `format_coef` without a final line `#### ...`."""

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
    """Builder of questions from JSONL files with `question` and `answer`.

    Attributes:
        train_path: training questions.
        test_path: held-out questions; None for no held-out groups.
        limit: maximum number of questions per file, taken from its start.
        instruction: instruction that follows each question.
        format_coef: penalty for answers in another format and for truncated answers.
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

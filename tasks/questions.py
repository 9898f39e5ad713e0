"""Questions without a reward, for distillation; the teacher may be shown more of each than the student is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import chz
import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tasks.renderer import renderer_of
from tasks.rows import read_rows
from tasks.sample import open_renderer

QUESTION = "{question}"
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class QuestionEnv(Env):
    """One question and one answer to it."""

    prompt: tinker.ModelInput
    stop: StopCondition

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return self.prompt, self.stop

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        return StepResult(
            reward=0.0, episode_done=True, next_observation=tinker.ModelInput.empty(), next_stop_condition=[]
        )


@dataclass(frozen=True)
class QuestionGroup(EnvGroupBuilder):
    """Several answers to one question.

    Attributes:
        asked: of the student.
        shown: to the teacher in its place.
    """

    asked: tinker.ModelInput
    shown: tinker.ModelInput
    stop: StopCondition
    num_answers: int

    async def make_envs(self) -> Sequence[Env]:
        return [QuestionEnv(self.asked, self.stop)] * self.num_answers

    def for_teacher(self) -> QuestionGroup:
        """The group as the teacher answers it."""
        return replace(self, asked=self.shown)


@dataclass(frozen=True)
class Questions(RLDataset):
    """Questions in the order of their file."""

    groups: Sequence[QuestionGroup]
    batch_size: int

    def get_batch(self, index: int) -> Sequence[QuestionGroup]:
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.groups) // self.batch_size)


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    """Questions from the rows of a JSONL file, whose fields `asked` and `shown` name in braces.

    Attributes:
        path: the rows to train on.
        test_path: held-out rows.
        asked: of the student.
        shown: to the teacher; without a field in it, it is a system message before what the student is asked. Empty:
            the same as the student.
        batch_size: questions of a batch.
        group_size: answers to each.
        renderer_name: the chat format; unset, the model's own.
    """

    path: str
    model_name_for_tokenizer: str
    test_path: str | None = None
    asked: str = QUESTION
    shown: str = ""
    batch_size: int = 1
    group_size: int = 1
    renderer_name: str | None = None

    async def __call__(self) -> tuple[Questions, Questions | None]:
        tokenizer = get_tokenizer(self.model_name_for_tokenizer)
        name = self.renderer_name or renderer_of(self.model_name_for_tokenizer, tokenizer)
        renderer = open_renderer(name, tokenizer)
        return self._read(self.path, renderer), self._read(self.test_path, renderer) if self.test_path else None

    def _read(self, path: str, renderer: Renderer) -> Questions:
        rows = read_rows(path, tuple(_FIELD.findall(self.asked)))
        return Questions([self._group(row, renderer) for row in rows], self.batch_size)

    def _group(self, row: Mapping[str, str], renderer: Renderer) -> QuestionGroup:
        asked = Message(role="user", content=fill(self.asked, row))
        shown = fill(self.shown, row)
        if shown == self.shown:
            to_teacher = [Message(role="system", content=shown), asked] if shown else [asked]
        else:
            to_teacher = [Message(role="user", content=shown)]
        return QuestionGroup(
            renderer.build_generation_prompt([asked]),
            renderer.build_generation_prompt(to_teacher),
            renderer.get_stop_sequences(),
            self.group_size,
        )


def fill(template: str, row: Mapping[str, str]) -> str:
    """A template with the fields of a row; other braces stay as they are.

    >>> fill('{question} Say it as {"json": 1}.', {"question": "Where?"})
    'Where? Say it as {"json": 1}.'
    """
    return _FIELD.sub(lambda found: row.get(found[1], found[0]), template)

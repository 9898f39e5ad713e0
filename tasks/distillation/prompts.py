"""Prompts without rewards, for distillation; the teacher's prompt may contain more than the student's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import chz
import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tasks.common.jsonl import _FIELD, QUESTION, fill, read_rows
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import open_renderer


@dataclass(frozen=True)
class PromptEnv(Env):
    """Environment of one prompt and one completion."""

    prompt: tinker.ModelInput
    stop: StopCondition

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return self.prompt, self.stop

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        return StepResult(
            reward=0.0, episode_done=True, next_observation=tinker.ModelInput.empty(), next_stop_condition=[]
        )


@dataclass(frozen=True)
class PromptGroup(EnvGroupBuilder):
    """Group of completions of one prompt.

    Attributes:
        student_prompt: prompt of the student.
        teacher_prompt: prompt of the teacher.
    """

    student_prompt: tinker.ModelInput
    teacher_prompt: tinker.ModelInput
    stop: StopCondition
    num_completions: int

    async def make_envs(self) -> Sequence[Env]:
        return [PromptEnv(self.student_prompt, self.stop)] * self.num_completions

    def for_teacher(self) -> PromptGroup:
        """Group that a teacher completes: the student's prompt is replaced by the teacher's."""
        return replace(self, student_prompt=self.teacher_prompt)


@dataclass(frozen=True)
class Prompts(RLDataset):
    """Dataset of prompts in the order of their file."""

    groups: Sequence[PromptGroup]
    batch_size: int

    def get_batch(self, index: int) -> Sequence[PromptGroup]:
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.groups) // self.batch_size)


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    """Builder of prompts from the rows of a JSONL file. Templates of prompts name the fields of a row in braces.

    Attributes:
        path: rows to train on.
        test_path: held-out rows.
        student_prompt: template of the student's prompt.
        teacher_prompt: template of the teacher's prompt. A template without fields of the rows becomes a system message
            before the student's prompt; with an empty template, the teacher gets the student's prompt.
        batch_size: prompts per batch.
        group_size: completions per prompt.
        renderer_name: chat format; the model's own by default.
    """

    path: str
    model_name_for_tokenizer: str
    test_path: str | None = None
    student_prompt: str = QUESTION
    teacher_prompt: str = ""
    batch_size: int = 1
    group_size: int = 1
    renderer_name: str | None = None

    async def __call__(self) -> tuple[Prompts, Prompts | None]:
        tokenizer = get_tokenizer(self.model_name_for_tokenizer)
        name = self.renderer_name or renderer_name_of(self.model_name_for_tokenizer, tokenizer)
        renderer = open_renderer(name, tokenizer)
        return self._read(self.path, renderer), self._read(self.test_path, renderer) if self.test_path else None

    def _read(self, path: str, renderer: Renderer) -> Prompts:
        student_fields, teacher_fields = _FIELD.findall(self.student_prompt), _FIELD.findall(self.teacher_prompt)
        rows = read_rows(path, tuple(dict.fromkeys(student_fields)))
        # Words in braces that are no fields of any row are part of a system message.
        if any(field in row for row in rows for field in teacher_fields):
            rows = read_rows(path, tuple(dict.fromkeys([*student_fields, *teacher_fields])))
        return Prompts([self._group(row, renderer) for row in rows], self.batch_size)

    def _group(self, row: Mapping[str, str], renderer: Renderer) -> PromptGroup:
        student_message = Message(role="user", content=fill(self.student_prompt, row))
        teacher_prompt = fill(self.teacher_prompt, row)
        if not teacher_prompt:
            teacher_messages = [student_message]
        elif teacher_prompt == self.teacher_prompt:  # no field was filled in
            teacher_messages = [Message(role="system", content=teacher_prompt), student_message]
        else:
            teacher_messages = [Message(role="user", content=teacher_prompt)]
        return PromptGroup(
            renderer.build_generation_prompt([student_message]),
            renderer.build_generation_prompt(teacher_messages),
            renderer.get_stop_sequences(),
            self.group_size,
        )

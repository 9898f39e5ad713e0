"""Off-policy distillation: sequences that a teacher wrote, or rates, made once and kept with the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial

import tinker
import torch
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from objectives.batch import Batch
from objectives.kept import Kept
from objectives.labels import without_labels
from tasks.distilled import as_teacher_sees
from tasks.features import load_kept, save_kept
from tasks.mixture import Batched, Item, Mixture
from tasks.options import Pending, call, step_task, submit, whole
from tasks.questions import QuestionGroup
from tasks.rollout import Group, rollout
from tasks.rollouts import Play
from tasks.source import Source, Trained
from tasks.taught import Taught, compute_forward_kl, pack_taught
from tasks.teacher import Asked, Teacher, behind, score, soften
from tasks.teacher_nll import TeacherNLL

TAUGHT_NAME = "taught.jsonl"

Lesson = tinker.Datum | EnvGroupBuilder

_PREPARING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="lessons")


@dataclass(frozen=True, slots=True)
class Lessons:
    """How a teacher makes sequences.

    Attributes:
        play: how it answers.
        key: of all that it depends on; what was made under another one is not used.
        top_k: how many of its likeliest tokens are learned at each position; 0 is the sequence's own.
    """

    key: str
    play: Play
    top_k: int


class TaughtSource(Source):
    """The sequences of several datasets, each with its teacher, who answers the groups and rates what there is."""

    def __init__(
        self,
        mixture: Mixture[Lesson],
        teachers: Sequence[Teacher],
        tokenizer: Tokenizer,
        lessons: Lessons,
        directory: RunDirectory,
    ) -> None:
        self._mixture, self._teachers, self._tokenizer = mixture, teachers, tokenizer
        self._lessons, self._directory = lessons, directory
        self._kept = Kept()
        self._under_way: dict[int, list[Taught]] = {}
        load_kept(self._kept, directory, TAUGHT_NAME)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._mixture)

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Start on the sequences of a step; they do not depend on the student."""
        return [_PREPARING.submit(copy_context().run, self._load, step)]

    def metrics(self, step: int, trained: Sequence[Trained], terms: Mapping[str, float]) -> dict[str, float]:
        if not self._lessons.top_k:
            return {}
        (found,) = trained
        return {"teacher_kl/forward": compute_forward_kl(self._under_way[step], found.logprobs_DT)}

    def held_out(self, tests: Sequence[Batched[Lesson] | None]) -> TeacherNLL | None:
        """What measures the student on held-out sequences, by dataset, and on the teachers' answers to such groups."""
        items = [
            Item(number, position, value)
            for number, test in enumerate(tests)
            for position, value in enumerate(_values(test))
        ]
        written = self._recall("test", items, partial(self._answer, step=0))
        asked = self._asked(items, written)
        datums = [each.datum for sequences in written for each in sequences]
        return TeacherNLL(datums, call(score, whole(asked)), self._tokenizer) if datums else None

    def _load(self, step: int) -> Batch:
        items = self._mixture.at(step)
        taught = self._recall("train", items, partial(self._teach, step=step))
        flat = [each for sequences in taught for each in sequences]
        # The metrics of a step are asked for before the next but one is loaded.
        self._under_way = {at: each for at, each in self._under_way.items() if at == step - 1} | {step: flat}
        batch = call(pack_lessons, whole(flat), self._tokenizer)
        datasets = [item.dataset for item, sequences in zip(items, taught, strict=True) for _ in sequences]
        return replace(batch, labels_D={"dataset": torch.tensor(datasets)})

    def _recall(
        self, part: str, items: Sequence[Item[Lesson]], make: Callable[[Sequence[Item[Lesson]]], list[list[Taught]]]
    ) -> list[list[Taught]]:
        """What there is to learn of each item: what is kept of it, or made now and then kept."""
        keys = [f"{self._lessons.key}/{part}/{_key(item)}" for item in items]
        known = self._kept.find(keys)
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
        if new:
            made = make(list(new.values()))
            self._kept.keep({key: [each.state() for each in found] for key, found in zip(new, made, strict=True)})
            call(save_kept, self._kept, self._directory, TAUGHT_NAME)
            known = self._kept.find(keys)
        return [[Taught.of_state(each) for each in known[key]] for key in keys]

    def _teach(self, items: Sequence[Item[Lesson]], step: int) -> list[list[Taught]]:
        written = self._answer(items, step)
        if not self._lessons.top_k:
            return written
        tops = iter(call(soften, whole(self._asked(items, written)), self._lessons.top_k))
        return [[replace(each, top=next(tops)) for each in sequences] for sequences in written]

    def _asked(self, items: Sequence[Item[Lesson]], written: Sequence[Sequence[Taught]]) -> list[Asked]:
        return [
            Asked(self._teachers[item.dataset], as_teacher_sees(item.value, each.datum))
            for item, sequences in zip(items, written, strict=True)
            for each in sequences
        ]

    def _answer(self, items: Sequence[Item[Lesson]], step: int) -> list[list[Taught]]:
        """The sequences of the items, those of groups by their teachers."""
        as_likely = self._lessons.play.temperature == 1
        pending = [self._start(item, step, index) for index, item in enumerate(items)]
        return [
            [Taught(datum, drawn=group is not None and as_likely) for datum in _written(item, group and group.result())]
            for item, group in zip(items, pending, strict=True)
        ]

    def _start(self, item: Item[Lesson], step: int, index: int) -> Pending[Group] | None:
        """Have the teacher answer a group; None for a sequence that is there."""
        if isinstance(item.value, tinker.Datum):
            return None
        group = item.value.for_teacher() if isinstance(item.value, QuestionGroup) else item.value
        policy = self._lessons.play.policy(self._teachers[item.dataset].sampler, item.dataset, item.position)
        return submit(rollout, whole(group), policy, self._lessons.play.strategy, step, index)


@step_task(name="batch")
def pack_lessons(taught: Sequence[Taught], tokenizer: Tokenizer) -> Batch:
    """`pack_taught` as a task.

    Raises:
        ConfigError: there is nothing to pack.
    """
    if not taught:
        raise ConfigError(
            "The teacher answered none of the groups of a step: look at the environment, or raise rollout.max_retries "
            "or rollout.timeout_s."
        )
    return pack_taught(taught, tokenizer)


def _written(item: Item[Lesson], group: Group | None) -> list[tinker.Datum]:
    """The sequences of an item, as the student sees them."""
    if isinstance(item.value, tinker.Datum):
        return [without_labels(item.value)]
    if group is None or group.trajectories is None:
        return []
    data = [datum for each in group.trajectories.trajectories_G for datum in trajectory_to_data(each, 0.0)]
    hard = [_supervised(datum) for datum in data]
    return [behind(item.value.asked, each) for each in hard] if isinstance(item.value, QuestionGroup) else hard


def _supervised(datum: tinker.Datum) -> tinker.Datum:
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": datum.loss_fn_inputs["mask"]}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def _values(dataset: Batched[Lesson] | None) -> list[Lesson]:
    return [value for index in range(len(dataset)) for value in dataset.get_batch(index)] if dataset else []


def _key(item: Item[Lesson]) -> str:
    """A sequence by its tokens, since epochs have them in other orders; a group by its place."""
    if isinstance(item.value, tinker.Datum):
        targets = item.value.loss_fn_inputs["target_tokens"].to_numpy().tobytes()
        tokens = hashlib.sha256(item.value.model_input.model_dump_json().encode() + targets).hexdigest()
        return f"{item.dataset}/{tokens}"
    return f"{item.dataset}/{item.position}"

"""Off-policy distillation: sequences that a teacher generates or scores, computed once and cached with the run."""

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
from objectives.jsonl_cache import JsonlCache
from objectives.labels import read_labels, read_text_labels, with_labels, without_labels
from tasks.common.datum_cache import load_cache, save_cache
from tasks.common.digests import digest_text
from tasks.common.task import Pending, call, opaque_argument, step_task
from tasks.distillation.mixture import BatchedDataset, Item, Mixture
from tasks.distillation.nll_evaluator import TeacherNLL
from tasks.distillation.on_policy import datum_for_teacher
from tasks.distillation.prompts import PromptGroup
from tasks.distillation.soft_targets import TeacherSequence, compute_forward_kl, pack_sequences
from tasks.rl.rollout_source import RolloutSettings
from tasks.rl.rollouts.group_rollout import Group, RolloutThreads
from tasks.rl.rollouts.hang_watch import HangWatch
from tasks.rl.trajectories import first_error
from tasks.training.batch_source import BatchSource, TrainedBatch
from tasks.training.teacher import Teacher, TeacherRequest, compute_top_k, replace_prompt, score

TAUGHT_NAME = "taught.jsonl"

TeacherInput = tinker.Datum | EnvGroupBuilder


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Settings of a teacher's sequences.

    Attributes:
        key: digest of all settings that the sequences depend on; their cache keys begin with it.
        rollout: settings of the teacher's rollouts.
        top_k: number of soft targets per position; 0 for hard targets.
        data_digest: digest of the data files; cache keys of groups whose prompts are not known end with it.
    """

    key: str
    rollout: RolloutSettings
    top_k: int
    data_digest: str


class TeacherDataSource(BatchSource):
    """Source of the sequences of several datasets, each with a teacher that completes prompts or scores sequences."""

    def __init__(
        self,
        mixture: Mixture[TeacherInput],
        teachers: Sequence[Teacher],
        tokenizer: Tokenizer,
        settings: SequenceSettings,
        directory: RunDirectory,
    ) -> None:
        super().__init__()
        self._mixture, self._teachers, self._tokenizer = mixture, teachers, tokenizer
        self._settings, self._directory = settings, directory
        self._cache = JsonlCache()
        self._pending: dict[int, list[TeacherSequence]] = {}
        self._has_warned = False
        self._has_warned_of_failure = False
        self._threads = RolloutThreads()
        self._preparing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="teacher-data")
        load_cache(self._cache, directory, TAUGHT_NAME)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._mixture)

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Start to load the sequences of a step, which do not depend on the student."""
        return [self._preparing.submit(copy_context().run, self._load, step)]

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        if not self._settings.top_k:
            return {}
        (minibatch,) = trained
        return {"teacher_kl/forward": compute_forward_kl(self._pending[step], minibatch.logprobs_DT)}

    def held_out(self, tests: Sequence[BatchedDataset[TeacherInput] | None]) -> TeacherNLL | None:
        """Evaluator on held-out sequences and the teachers' completions of held-out prompts; None without any."""
        items = [
            Item(number, position, value)
            for number, test in enumerate(tests)
            for position, value in enumerate(dataset_values(test))
        ]
        sequences_I = self._cached("test", items, partial(self._hard_sequences, step=0))
        datums = [sequence.datum for sequences in sequences_I for sequence in sequences]
        if not datums:
            return None
        requests = self._requests(items, sequences_I)
        if not requests:
            raise ConfigError(
                "No row of the held-out data has a trained token: raise max_length, or leave the data out."
            )
        return TeacherNLL(datums, call(score, opaque_argument(requests)), self._tokenizer)

    def watch_hangs(self, hangs: HangWatch) -> None:
        """Watch the groups that teachers complete from now on."""
        self._threads.hangs = hangs

    def close(self) -> None:
        self._threads.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _load(self, step: int) -> Batch:
        items = self._mixture.at(step)
        loaded_I = self._cached("train", items, partial(self._generate, step=step))
        sequences_I = [[sequence for sequence in sequences if sequence.is_trained] for sequences in loaded_I]
        flat = [sequence for sequences in sequences_I for sequence in sequences]
        self._warn_of_untrained(step, sum(map(len, loaded_I)), len(flat))
        # Only two steps are needed: the metrics of step - 2 are computed before this step is loaded.
        self._pending = {other: values for other, values in self._pending.items() if other == step - 1} | {step: flat}
        batch = call(pack_teacher_data, opaque_argument(flat), self._tokenizer)
        labelled = [
            _labelled(item, sequence)
            for item, sequences in zip(items, sequences_I, strict=True)
            for sequence in sequences
        ]
        datasets = [item.dataset for item, sequences in zip(items, sequences_I, strict=True) for _ in sequences]
        labels_D = {**batch.labels_D, **read_labels(labelled), "dataset": torch.tensor(datasets)}
        return replace(batch, labels_D=labels_D, text_labels_D=read_text_labels(labelled))

    def _warn_of_untrained(self, step: int, num_sequences: int, num_trained: int) -> None:
        if num_trained < num_sequences and not self._has_warned:
            self._has_warned = True
            self._warnings["untrained_rows"] = (
                f"{num_sequences - num_trained} of the {num_sequences} sequences of step {step} have no trained token, "
                "and later steps may have more: raise max_length, which may have cut them off, or remove the rows."
            )

    def _cached(
        self,
        part: str,
        items: Sequence[Item[TeacherInput]],
        compute: Callable[[Sequence[Item[TeacherInput]]], list[list[TeacherSequence]]],
    ) -> list[list[TeacherSequence]]:
        """Sequences of each item from the cache; missing ones are computed and saved."""
        keys = [f"{self._settings.key}/{part}/{self._key(item)}" for item in items]
        cached = self._cache.find(keys)
        new = {key: item for key, item in zip(keys, items, strict=True) if not cached.get(key)}
        if new:
            computed = zip(new, compute(list(new.values())), strict=True)
            # A failed group has no sequences and is not cached, so a later epoch samples it again.
            self._cache.put({key: [sequence.to_json() for sequence in values] for key, values in computed if values})
            call(save_cache, self._cache, self._directory, TAUGHT_NAME)
            cached = self._cache.find(keys)
        return [[TeacherSequence.from_json(data) for data in cached.get(key, [])] for key in keys]

    def _key(self, item: Item[TeacherInput]) -> str:
        is_known = isinstance(item.value, tinker.Datum | PromptGroup)
        return item_key(item) if is_known else f"{item_key(item)}/{self._settings.data_digest}"

    def _generate(self, items: Sequence[Item[TeacherInput]], step: int) -> list[list[TeacherSequence]]:
        sequences_I = self._hard_sequences(items, step)
        if not self._settings.top_k:
            return sequences_I
        requests = self._requests(items, sequences_I)
        tops = iter(call(compute_top_k, opaque_argument(requests), self._settings.top_k))
        return [
            [replace(sequence, top=next(tops)) if sequence.is_trained else sequence for sequence in sequences]
            for sequences in sequences_I
        ]

    def _requests(
        self, items: Sequence[Item[TeacherInput]], sequences_I: Sequence[Sequence[TeacherSequence]]
    ) -> list[TeacherRequest]:
        """Requests to score the sequences that have a trained token."""
        return [
            TeacherRequest(self._teachers[item.dataset], datum_for_teacher(item.value, sequence.datum))
            for item, sequences in zip(items, sequences_I, strict=True)
            for sequence in sequences
            if sequence.is_trained
        ]

    def _hard_sequences(self, items: Sequence[Item[TeacherInput]], step: int) -> list[list[TeacherSequence]]:
        """Sequences without soft targets: given sequences, and the teachers' completions of groups."""
        # With a temperature, truncation or a completer, samples do not follow the distribution of the soft targets.
        rollout = self._settings.rollout
        is_unbiased = rollout.distribution.is_plain and rollout.completer is None
        pending = [self._start(item, step, index) for index, item in enumerate(items)]
        groups = [group and group.result() for group in pending]
        self._warn_of_failures([group for group in groups if group is not None])
        return [
            [
                TeacherSequence(datum, drawn=group is not None and is_unbiased, text_labels=labels)
                for datum, labels in _hard_datums(item, group)
            ]
            for item, group in zip(items, groups, strict=True)
        ]

    def _warn_of_failures(self, groups: Sequence[Group]) -> None:
        """Warn of the first groups of this process that failed."""
        failed = [group for group in groups if group.trajectories is None]
        if failed and not self._has_warned_of_failure:
            self._has_warned_of_failure = True
            self._warnings["rollout.failed"] = (
                f"{len(failed)} of {len(groups)} groups of the teacher failed in all attempts and are left out "
                f"({first_error(failed)}), and later steps may have more: check the environment, or raise "
                "rollout.max_retries or rollout.timeout_s."
            )

    def _start(self, item: Item[TeacherInput], step: int, index: int) -> Pending[Group] | None:
        """Start the teacher's rollout of a group; None for a given sequence."""
        if isinstance(item.value, tinker.Datum):
            return None
        group = item.value.for_teacher() if isinstance(item.value, PromptGroup) else item.value
        policy = self._settings.rollout.policy(self._teachers[item.dataset].sampler, item.dataset, item.position)
        return self._threads.start(group, policy, self._settings.rollout.strategy, step, index).pending


@step_task(name="batch")
def pack_teacher_data(sequences: Sequence[TeacherSequence], tokenizer: Tokenizer) -> Batch:
    """Pack the sequences of a step.

    Raises:
        ConfigError: `sequences` is empty.
    """
    if not sequences:
        raise ConfigError(
            "No sequence of a step has a trained token: raise max_length of the data or, if groups failed, check the "
            "environment or raise rollout.max_retries or rollout.timeout_s."
        )
    return pack_sequences(sequences, tokenizer)


def _hard_datums(item: Item[TeacherInput], group: Group | None) -> list[tuple[tinker.Datum, Mapping[str, str]]]:
    """Datums of an item with the student's prompt, each with the text labels of its environment."""
    if isinstance(item.value, tinker.Datum):
        return [(without_labels(item.value), {})]
    if group is None or group.trajectories is None:
        return []
    trajectories = group.trajectories.trajectories_G
    labels_G = group.text_labels_G or ({},) * len(trajectories)
    datums = [
        (_supervised(datum), labels)
        for trajectory, labels in zip(trajectories, labels_G, strict=True)
        for datum in trajectory_to_data(trajectory, 0.0)
    ]
    if isinstance(item.value, PromptGroup):
        return [(replace_prompt(item.value.student_prompt, datum), labels) for datum, labels in datums]
    return datums


def _labelled(item: Item[TeacherInput], sequence: TeacherSequence) -> tinker.Datum:
    """Return the datum of a sequence with its labels; those of a given one come from the data, not from the cache."""
    if isinstance(item.value, tinker.Datum):
        return item.value
    return with_labels(sequence.datum, {name: str(text) for name, text in sequence.text_labels.items()})


def _supervised(datum: tinker.Datum) -> tinker.Datum:
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": datum.loss_fn_inputs["mask"]}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def dataset_values(dataset: BatchedDataset[TeacherInput] | None) -> list[TeacherInput]:
    """Return all items of a dataset; empty for None."""
    return [value for index in range(len(dataset)) for value in dataset.get_batch(index)] if dataset else []


def item_key(item: Item[TeacherInput]) -> str:
    """Cache key of an item: the index of its dataset, the position of a group, and a digest of what is known of it.

    The position of a given sequence differs between epochs; that of a group determines the seeds of its samples.
    """
    if isinstance(item.value, tinker.Datum):
        inputs = (item.value.loss_fn_inputs[name].to_numpy().tobytes() for name in ("target_tokens", "weights"))
        digest = hashlib.sha256(item.value.model_input.model_dump_json().encode() + b"".join(inputs)).hexdigest()
        return f"{item.dataset}/{digest}"
    if isinstance(item.value, PromptGroup):
        group = item.value
        prompts = [prompt.model_dump_json() for prompt in (group.student_prompt, group.teacher_prompt)]
        return f"{item.dataset}/{item.position}/{digest_text(repr([*prompts, group.stop, group.num_completions]))}"
    return f"{item.dataset}/{item.position}"

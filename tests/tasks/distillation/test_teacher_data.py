"""Batches of a teacher's data: targets of its samples, and rows without a trained token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
from tinker import types
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.supervised.types import SupervisedDataset

from blocks import RunStorage
from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from objectives.batch import Batch, unpack
from objectives.labels import NONE, with_labels
from tasks.common.task import inline_tasks
from tasks.distillation.mixture import Mixture
from tasks.distillation.prompts import PromptEnv, PromptGroup, Prompts
from tasks.distillation.teacher_data import SequenceSettings, TeacherDataSource
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollout_source import RolloutSettings
from tasks.rl.rollouts.custom_completer import CompleterSpec
from tasks.rl.rollouts.group_rollout import RetryWholeGroup
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.teacher import Teacher, hard_datum

TOKENIZER: Any = byte_tokenizer()
PROMPT = types.ModelInput.from_ints([5, 6])


class Sampler:
    """Sampling client that samples the token 97; its likeliest tokens are 1 and 2."""

    async def sample(
        self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, **_: Any
    ) -> SimpleNamespace:
        return SimpleNamespace(
            sequences=[SimpleNamespace(tokens=[97], logprobs=[-4.0], stop_reason="stop")] * num_samples,
            prompt_cache_hit_tokens=0,
            topk_prompt_logprobs=[None, *[[(1, math.log(0.6)), (2, math.log(0.2))]] * (prompt.length - 1)],
            prompt_logprobs=[None, *[-4.0] * (prompt.length - 1)],
        )

    async def compute_logprobs(self, prompt: types.ModelInput, last_n: int | None = None) -> list[float | None]:
        return [None, *[-4.0] * (prompt.length - 1)]


class Rows(SupervisedDataset):
    """One batch of given sequences."""

    def __init__(self, *datums: tinker.Datum) -> None:
        self.datums = list(datums)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self.datums

    def __len__(self) -> int:
        return 1


class Opaque(EnvGroupBuilder):
    """Group of one completion of a prompt, as of an environment of the user."""

    async def make_envs(self) -> list[PromptEnv]:
        return [PromptEnv(PROMPT, [])]


class RuledEnv(PromptEnv):
    """Environment with a text label."""

    text_labels: dict[str, str]


class Ruled(EnvGroupBuilder):
    """Group of one completion."""

    def __init__(self, rules: str) -> None:
        self.rules = rules

    async def make_envs(self) -> list[PromptEnv]:
        env = RuledEnv(PROMPT, [])
        env.text_labels = {"rules": self.rules}
        return [env]


class Groups(RLDataset):
    """One batch of groups."""

    def __init__(self, *groups: EnvGroupBuilder) -> None:
        self.groups = list(groups)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return self.groups

    def __len__(self) -> int:
        return 1


def open_source(
    folder: Path, dataset: Any, top_k: int = 2, completer: CompleterSpec | None = None, data: str = "data"
) -> TeacherDataSource:
    """Open a source of steps of two items."""
    sampling = SamplingDistribution()
    rollouts = RolloutSettings(0, 4, sampling, RetryWholeGroup(max_retries=0), AdvantageSettings(), completer)
    teacher = Teacher(cast(tinker.SamplingClient, Sampler()), "teacher")
    directory = RunStorage(url=str(folder)).run_directory("run")
    mixture = Mixture[Any]([dataset], [1.0], 2, seed=0)
    settings = SequenceSettings("key", rollouts, top_k, data)
    return TeacherDataSource(mixture, [teacher], TOKENIZER, settings, directory)


def load_batch(source: TeacherDataSource) -> Batch:
    """Load the first step of a source."""
    with inline_tasks():
        (pending,) = source.load(0, cast(tinker.TrainingClient, None))
        return pending.result()


@pytest.mark.parametrize(
    ("completer", "targets", "weights"),
    [
        (None, [1, 97], [0.6, 1.0]),
        (CompleterSpec.load("rollout_parts:OneOf", {"tokens": [97]}), [1, 2], [0.75, 0.25]),
    ],
    ids=["full distribution", "completer"],
)
def test_only_samples_of_the_full_distribution_are_targets(
    tmp_path: Path, completer: CompleterSpec | None, targets: list[int], weights: list[float]
) -> None:
    prompts = Prompts([PromptGroup(PROMPT, PROMPT, [], num_completions=1)] * 2, batch_size=2)
    batch = load_batch(open_source(tmp_path, prompts, completer=completer))
    assert batch.target_tokens_DT[batch.mask_DT].tolist() == [targets] * 2
    assert batch.weights_DT[batch.mask_DT].tolist() == [pytest.approx(weights)] * 2


def test_stored_completions_are_those_of_the_present_prompts(tmp_path: Path) -> None:
    """Corrected data, before the first checkpoint or as `accept_changes` allows: the settings are the same."""
    other = types.ModelInput.from_ints([7, 8])
    groups = [PromptGroup(PROMPT, PROMPT, [], num_completions=1), PromptGroup(other, PROMPT, [], num_completions=1)]
    inputs: list[list[list[int]]] = []
    for groups_of_start in (groups[:1] * 2, groups, groups[:1] * 2):
        source = open_source(tmp_path, Prompts(groups_of_start, batch_size=2))
        inputs.append([datum.model_input.to_ints() for datum in load_batch(source).datums])
        with inline_tasks():
            assert source.held_out([Prompts(groups_of_start, batch_size=2)])
    assert inputs == [[[5, 6]] * 2, [[5, 6], [7, 8]], [[5, 6]] * 2]
    # Each start reads the prompts that it knows: two, then one, then none is new, in both parts.
    lines = (tmp_path / "run" / "taught.jsonl").read_text().splitlines()
    assert [len(json.loads(line.partition(" ")[2])) for line in lines] == [2, 2, 1, 1]


def test_completions_of_an_environment_are_stored_with_its_data(tmp_path: Path) -> None:
    """Its prompts are unknown before a rollout."""
    group = Opaque()
    for data in ("old", "new", "old"):
        load_batch(open_source(tmp_path, Groups(group, group), data=data))
    lines = (tmp_path / "run" / "taught.jsonl").read_text().splitlines()
    keys = [[*json.loads(line.partition(" ")[2])] for line in lines]
    assert keys == [[f"key/train/0/{position}/{data}" for position in (0, 1)] for data in ("old", "new")]


@pytest.mark.parametrize("top_k", [0, 2])
def test_rows_without_a_trained_token_are_left_out(tmp_path: Path, top_k: int) -> None:
    rows = Rows(hard_datum([5, 6, 7], [0.0] * 3), hard_datum([5, 6, 8], [0.0, 0.0, 1.0]))
    for _ in range(2):  # the second source reads the stored sequences of the first
        source = open_source(tmp_path, rows, top_k)
        batch = load_batch(source)
        (warning,) = source.pop_warnings().values()
        assert warning.startswith("1 of the 2 sequences of step 0 have no trained token")
        assert (batch.num_datums, batch.labels_D["dataset"].tolist()) == (1, [0])
        assert float(batch.weights_DT.sum()) == pytest.approx(1.0)


def test_rows_with_the_same_tokens_keep_their_own_weights(tmp_path: Path) -> None:
    rows = Rows(hard_datum([5, 6, 7], [0.0, 1.0, 0.0]), hard_datum([5, 6, 7], [0.0, 0.0, 1.0]))
    batch = load_batch(open_source(tmp_path, rows, top_k=0))
    assert [weights.tolist() for weights in unpack(batch.weights_DT, batch.offsets_D)] == [[1.0, 0.0], [0.0, 1.0]]


def test_labels_and_prompts_of_given_sequences_are_kept(tmp_path: Path) -> None:
    """The labels are not part of the cache; the prompts differ in their first token alone, which is no target."""
    for rules in ("x=1", "x=2"):
        rows = Rows(
            with_labels(hard_datum([5, 6, 7], [0.0, 0.0, 1.0]), {"group": 3, "rules": rules}),
            hard_datum([8, 6, 7], [0.0, 0.0, 1.0]),
        )
        batch = load_batch(open_source(tmp_path, rows, top_k=0))
        first = [datum.model_input.to_ints()[0] for datum in batch.datums].index(5)
        labels = {name: label_D.tolist() for name, label_D in batch.labels_D.items()}
        assert labels == {"prompt": [0, 1], "group": [3, NONE] if first == 0 else [NONE, 3], "dataset": [0, 0]}
        assert batch.text_labels_D == {"rules": (rules, "") if first == 0 else ("", rules)}
        assert all(name in {"target_tokens", "weights"} for datum in batch.datums for name in datum.loss_fn_inputs)


def test_text_labels_of_environments_are_stored_with_the_completions(tmp_path: Path) -> None:
    for _ in range(2):  # the second source reads the stored completions
        batch = load_batch(open_source(tmp_path, Groups(Ruled("x=1"), Ruled("x=2"))))
        assert batch.text_labels_D == {"rules": ("x=1", "x=2")}
    assert len((tmp_path / "run" / "taught.jsonl").read_text().splitlines()) == 1


def test_failed_groups_are_warned_of(tmp_path: Path) -> None:
    class Broken(Opaque):
        async def make_envs(self) -> list[PromptEnv]:
            raise ValueError("no such problem")

    source = open_source(tmp_path, Groups(Broken(), Opaque()))
    assert load_batch(source).num_datums == 1
    (warning,) = source.pop_warnings().values()
    assert "1 of 2 groups of the teacher failed in all attempts and are left out" in warning
    assert "no such problem" in warning


def test_a_step_without_a_trained_token_is_an_error(tmp_path: Path) -> None:
    untrained = Rows(hard_datum([5, 6, 7], [0.0] * 3), hard_datum([5, 8], [0.0] * 2))
    source = open_source(tmp_path, untrained)
    with pytest.raises(ConfigError, match="No sequence of a step has a trained token: raise max_length"):
        load_batch(source)
    with inline_tasks(), pytest.raises(ConfigError, match="No row of the held-out data has a trained token"):
        source.held_out([untrained])


def test_held_out_rows_without_a_trained_token_do_not_count(tmp_path: Path) -> None:
    rows = Rows(hard_datum([5, 6, 7], [0.0] * 3), hard_datum([5, 6, 8], [0.0, 0.0, 1.0]))
    with inline_tasks():
        evaluator = open_source(tmp_path, rows).held_out([rows])
    assert evaluator is not None
    assert (evaluator.num_datums, evaluator.num_untrained) == (2, 1)

"""Rollouts beside the training: no group is older than its bound, none is trained on twice, and none is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import pytest
import tinker
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, StepResult

from blocks.errors import ConfigError
from objectives.batch import Batch
from tasks.advantages import Shape
from tasks.off_policy import OffPolicySource
from tasks.options import folded
from tasks.problems import Problems, split
from tasks.rollout import Patient
from tasks.rollouts import Cut, Play
from tasks.source import Trained

PLAY = Play(0, 2, 1.0, Patient(max_retries=0), Shape())


@dataclass(frozen=True)
class Numbered(Env):
    """One turn on a prompt that is the group's number; waits as long as it is told, or fails."""

    number: int
    delay: threading.Event | None
    fails: bool

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return types.ModelInput.from_ints([self.number + 1, 2]), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        while self.delay and not self.delay.is_set():
            await asyncio.sleep(0.01)
        if self.fails:
            raise ValueError("this one is broken")
        return StepResult(float(self.number), True, types.ModelInput.empty(), [])


@dataclass(frozen=True)
class NumberedGroup(EnvGroupBuilder):
    env: Numbered

    async def make_envs(self) -> Sequence[Env]:
        return [self.env] * 2


@dataclass(frozen=True)
class NumberedGroups(RLDataset):
    """Batches of two groups; `delayed` wait for an event, `broken` fail."""

    num_batches: int
    delayed: dict[int, threading.Event]
    broken: frozenset[int] = frozenset()

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        numbers = (2 * index, 2 * index + 1)
        return [NumberedGroup(Numbered(n, self.delayed.get(n), n in self.broken)) for n in numbers]

    def __len__(self) -> int:
        return self.num_batches


class Tokens:
    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@dataclass(frozen=True)
class Snapshots:
    """Of weights that never change."""

    sampler: tinker.SamplingClient

    def save_weights_and_get_sampling_client(self) -> Snapshots:
        return self

    def result(self) -> tinker.SamplingClient:
        return self.sampler


@pytest.fixture(scope="module")
def client(engine_url: str) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield Snapshots(service.create_sampling_client(base_model="tiny").result())


@pytest.fixture(autouse=True)
def without_task_runs() -> Iterator[None]:
    with folded():
        yield


def open_source(dataset: NumberedGroups, cut: Cut | None = None, max_age: int = 1) -> OffPolicySource:
    return OffPolicySource(dataset, None, cast(Any, Tokens()), PLAY, cut or Cut(), max_age)


def numbers_of(batches: Sequence[Batch]) -> list[int]:
    """The groups in the minibatches of a step, by their prompts."""
    firsts = [datum.model_input.to_ints()[0] - 1 for batch in batches for datum in batch.datums]
    assert firsts[::2] == firsts[1::2]
    return firsts[::2]


def take(source: OffPolicySource, step: int, client: Any) -> tuple[list[int], dict[str, float]]:
    batches = [each.result() for each in source.load(step, client)]
    logprobs = [cast(Any, each.sampling_logprobs_DT) for each in batches]
    trained = [Trained(batch, each) for batch, each in zip(batches, logprobs, strict=True)]
    return numbers_of(batches), source.metrics(step, trained, {"loss/base": 0.0})


def test_a_slow_group_holds_up_nobody_and_is_played_again_when_it_is_too_old(client: Any) -> None:
    until = threading.Event()
    with closing(open_source(NumberedGroups(8, {1: until}))) as source:
        source.begin(0, 4, {})
        steps = [take(source, step, client) for step in range(3)]
        assert 1 not in [number for numbers, _ in steps for number in numbers]
        until.set()
        for _ in range(200):  # until it has come in, too late for the next step
            if any(each.place == (0, 1) for each in source._played):
                break
            time.sleep(0.01)
        steps.append(take(source, 3, client))
    numbers = [number for each, _ in steps for number in each]
    assert len(numbers) == len(set(numbers)) == 8
    assert max(metrics["async/staleness_max"] for _, metrics in steps) == 1
    assert steps[0][1]["async/staleness_max"] == 0
    assert steps[3][1]["async/groups_replayed"] == 1


def test_a_resumed_run_trains_on_every_group_once(client: Any) -> None:
    dataset = NumberedGroups(6, {})
    with closing(open_source(dataset, max_age=2)) as source:
        source.begin(0, 6, {})
        before = [number for step in range(3) for number in take(source, step, client)[0]]
        state = source.state(2)
        assert source.state(3)["next_step"] >= 3
    with closing(open_source(dataset, max_age=2)) as source:
        source.begin(2, 6, state)
        after = [number for step in range(2, 6) for number in take(source, step, client)[0]]
    assert sorted(before[:4] + after) == list(range(12))


def test_another_group_takes_the_place_of_one_that_fails(client: Any) -> None:
    with closing(open_source(NumberedGroups(8, {}, broken=frozenset({0, 3})))) as source:
        source.begin(0, 2, {})
        steps = [take(source, step, client) for step in range(2)]
    numbers = [number for each, _ in steps for number in each]
    assert len(set(numbers)) == 4
    assert not {0, 3} & set(numbers)
    assert sum(metrics["rollout_errors/groups_skipped"] for _, metrics in steps) == 2


def test_where_none_can_be_played_the_run_ends(client: Any) -> None:
    with closing(open_source(NumberedGroups(8, {}, broken=frozenset(range(16))))) as source:
        source.begin(0, 2, {})
        with pytest.raises(ConfigError, match=r"could not be played .*this one is broken"):
            take(source, 0, client)


def test_minibatches_and_updates_share_the_groups_of_a_step(client: Any) -> None:
    cut = Cut(groups_per_batch=5, num_substeps=2, num_minibatches=2)
    with closing(open_source(NumberedGroups(6, {}), cut)) as source:
        source.begin(0, 2, {})
        batches = [each.result() for each in source.load(0, client)]
    assert [each.num_datums // 2 for each in batches] == [1, 1, 1, 2]
    assert source.num_minibatches == 2
    assert len(set(numbers_of(batches))) == 5


def test_groups_are_taken_in_turn_over_batches_and_epochs() -> None:
    dataset = NumberedGroups(3, {})
    problems = Problems(dataset, 4)
    assert problems.num_steps == 1
    found = [[cast(NumberedGroup, each).env.number for each in problems.of_step(step)] for step in range(2)]
    assert found == [[0, 1, 2, 3], [4, 5, 0, 1]]
    with pytest.raises(ConfigError, match="have 6 groups and groups_per_batch is 7"):
        Problems(dataset, 7)
    with pytest.raises(ConfigError, match="A step has 2 groups, and num_minibatches times num_substeps is 3"):
        split(2, 3)

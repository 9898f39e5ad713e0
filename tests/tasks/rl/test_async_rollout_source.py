"""Asynchronous rollouts: group ages stay within the bound, and each group is trained on exactly once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, StepResult

from blocks.errors import ConfigError
from objectives.batch import Batch
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.async_rollout_source import AsyncRolloutSource
from tasks.rl.group_batches import GroupBatches, split
from tasks.rl.rollout_source import MinibatchSettings, RolloutSettings, RolloutSource
from tasks.rl.rollouts.group_rollout import RetryWholeGroup
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.batch_source import TrainedBatch

pytestmark = pytest.mark.usefixtures("without_task_runs")

SETTINGS = RolloutSettings(0, 2, SamplingDistribution(), RetryWholeGroup(max_retries=0), AdvantageSettings())


@dataclass(frozen=True)
class Numbered(Env):
    """Environment of one turn whose prompt is the group's number; may wait for an event or fail."""

    number: int
    event: threading.Event | None
    fails: bool

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return types.ModelInput.from_ints([self.number + 1, 2]), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        while self.event and not self.event.is_set():
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


def open_source(
    dataset: NumberedGroups, minibatches: MinibatchSettings | None = None, max_age: int = 1
) -> AsyncRolloutSource:
    return AsyncRolloutSource(dataset, None, cast(Any, Tokens()), SETTINGS, minibatches or MinibatchSettings(), max_age)


def numbers_of(batches: Sequence[Batch]) -> list[int]:
    """Numbers of the groups in the minibatches of a step."""
    firsts = [datum.model_input.to_ints()[0] - 1 for batch in batches for datum in batch.datums]
    assert firsts[::2] == firsts[1::2]
    return firsts[::2]


def take(source: AsyncRolloutSource, step: int, snapshots: Any) -> tuple[list[int], dict[str, float]]:
    batches = [pending.result() for pending in source.load(step, snapshots)]
    trained = [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT)) for batch in batches]
    return numbers_of(batches), source.metrics(step, trained, {"loss/base": 0.0})


def test_slow_group_does_not_block_others_and_is_rolled_out_again_when_too_old(snapshots: Any) -> None:
    release = threading.Event()
    with closing(open_source(NumberedGroups(8, {1: release}))) as source:
        source.begin(0, 4, {})
        steps = [take(source, step, snapshots) for step in range(3)]
        assert 1 not in [number for numbers, _ in steps for number in numbers]
        release.set()
        for _ in range(200):  # until group 1 is complete, too late for the next step
            if any(completed.place == (0, 1) for completed in source._completed):
                break
            time.sleep(0.01)
        steps.append(take(source, 3, snapshots))
    numbers = [number for step_numbers, _ in steps for number in step_numbers]
    assert len(numbers) == len(set(numbers)) == 8
    assert max(metrics["async/staleness_max"] for _, metrics in steps) == 1
    assert steps[0][1]["async/staleness_max"] == 0
    assert steps[3][1]["async/groups_replayed"] == 1


def test_resumed_run_trains_on_every_group_once(snapshots: Any) -> None:
    dataset = NumberedGroups(6, {})
    with closing(open_source(dataset, max_age=2)) as source:
        source.begin(0, 6, {})
        before = [number for step in range(3) for number in take(source, step, snapshots)[0]]
        state = source.state(2)
        assert source.state(3)["next_step"] >= 3
    with closing(open_source(dataset, max_age=2)) as source:
        source.begin(2, 6, state)
        after = [number for step in range(2, 6) for number in take(source, step, snapshots)[0]]
    assert sorted(before[:4] + after) == list(range(12))


def test_failed_group_is_replaced_by_another(snapshots: Any) -> None:
    with closing(open_source(NumberedGroups(8, {}, broken=frozenset({0, 3})))) as source:
        source.begin(0, 2, {})
        steps = [take(source, step, snapshots) for step in range(2)]
    numbers = [number for step_numbers, _ in steps for number in step_numbers]
    assert len(set(numbers)) == 4
    assert not {0, 3} & set(numbers)
    assert sum(metrics["rollout_errors/groups_skipped"] for _, metrics in steps) == 2


def test_run_ends_if_all_groups_fail(snapshots: Any) -> None:
    with closing(open_source(NumberedGroups(8, {}, broken=frozenset(range(16))))) as source:
        source.begin(0, 2, {})
        with pytest.raises(ConfigError, match=r"groups failed since the last step .*this one is broken"):
            take(source, 0, snapshots)


def test_run_ends_although_one_group_is_complete(snapshots: Any) -> None:
    with closing(open_source(NumberedGroups(99, {}, broken=frozenset(range(1, 198))))) as source:
        source.begin(0, 2, {})
        with pytest.raises(ConfigError, match="groups failed since the last step"):
            take(source, 0, snapshots)


def test_an_error_of_the_data_ends_the_run(snapshots: Any) -> None:
    """The data is read for the group that replaces a failed one."""

    class Unreadable(NumberedGroups):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            if index == 3:
                raise ValueError("row 7 is torn")
            return super().get_batch(index)

    with closing(open_source(Unreadable(2000, {}, broken=frozenset({0, 1, 2, 3})))) as source:
        source.begin(0, 2, {})
        with pytest.raises(ConfigError, match="row 7 is torn"):
            list(map(partial(take, source, snapshots=snapshots), range(2)))


def test_minibatches_and_updates_share_the_groups_of_a_step(snapshots: Any) -> None:
    minibatches = MinibatchSettings(groups_per_batch=5, num_substeps=2, num_minibatches=2)
    with closing(open_source(NumberedGroups(6, {}), minibatches)) as source:
        source.begin(0, 2, {})
        batches = [pending.result() for pending in source.load(0, snapshots)]
    assert [batch.num_datums // 2 for batch in batches] == [1, 1, 1, 2]
    assert source.num_minibatches == 2
    assert len(set(numbers_of(batches))) == 5


@pytest.mark.parametrize("minibatches", [MinibatchSettings(num_substeps=2), MinibatchSettings(num_minibatches=2)])
def test_split_steps_take_a_short_last_batch_with_the_first_groups_of_the_next_epoch(
    minibatches: MinibatchSettings,
) -> None:
    """A step with one group could not be split."""

    class ShortLastBatch(NumberedGroups):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return super().get_batch(index)[: 2 - index]

    with closing(RolloutSource(ShortLastBatch(2, {}), None, cast(Any, Tokens()), SETTINGS, minibatches)) as source:
        assert [cast(NumberedGroup, group).env.number for group in source.problems.at(1)] == [2, 0]
    with closing(RolloutSource(NumberedGroups(2, {}), None, cast(Any, Tokens()), SETTINGS, minibatches)) as source:
        assert source.problems.num_steps == 2, "a last batch that can be split stays as it is"


@pytest.mark.parametrize("dropped", [{0}, {2}, {7}, {0, 4}, {6, 7}, {0, 1}, {2, 3}])
def test_steps_of_equal_size_have_all_groups_of_uneven_batches(dropped: set[int]) -> None:
    class Dropping(NumberedGroups):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return [group for group in super().get_batch(index) if cast(NumberedGroup, group).env.number not in dropped]

    def numbers(problems: GroupBatches) -> list[int]:
        steps = [problems.at(step) for step in range(problems.num_steps)]
        assert {len(groups) for groups in steps} == {problems.groups_per_batch}
        return [cast(NumberedGroup, group).env.number for groups in steps for group in groups]

    kept = [number for number in range(8) if number not in dropped]
    assert numbers(GroupBatches(Dropping(4, {}), 1)) == kept
    assert numbers(GroupBatches(Dropping(4, {}), None, can_refill=True)) == kept[: len(kept) // 2 * 2]
    # A batch without a group cannot be a step.
    with pytest.raises(ConfigError, match="The environments have no group"):
        GroupBatches(Dropping(0, {}), None)
    own = GroupBatches(Dropping(4, {}), None)
    assert all(own.at(step) for step in range(own.num_steps))


def test_a_batch_of_another_size_in_data_that_is_too_large_to_read_is_named() -> None:
    class Endless(NumberedGroups):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return super().get_batch(index)[: {2: 1, 3: 0}.get(index)]

        def __len__(self) -> int:
            return 10**12

    problems = GroupBatches(Endless(0, {}), 4)
    assert problems.num_steps == 10**12 // 2
    assert [cast(NumberedGroup, group).env.number for group in problems.at(10**11)] == [
        *range(4 * 10**11, 4 * 10**11 + 4)
    ]
    with pytest.raises(ConfigError, match=r"Batch 2 of the environments has the size 1 instead of 2"):
        problems.at(1)
    problems = GroupBatches(Endless(0, {}), None)
    assert len(problems.at(2)) == 1
    with pytest.raises(ConfigError, match=r"Batch 3 of the environments has no group: check the rows"):
        problems.at(3)


def test_group_batches_are_consecutive_over_batches_and_epochs() -> None:
    dataset = NumberedGroups(3, {})
    problems = GroupBatches(dataset, 4)
    assert problems.num_steps == 1
    numbers = [[cast(NumberedGroup, group).env.number for group in problems.at(step)] for step in range(2)]
    assert numbers == [[0, 1, 2, 3], [4, 5, 0, 1]]
    with pytest.raises(ConfigError, match="groups_per_batch=7 exceeds the 6 groups"):
        GroupBatches(dataset, 7)
    with pytest.raises(ConfigError, match="A step has 2 groups, but num_minibatches times num_substeps is 3"):
        split(2, 3)

"""Refills: groups that teach nothing are replaced by the next groups of the data, in a deterministic order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from random_groups import Decoder
from source_steps import Step, finish, numbers_of, take
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, StepResult

from flows.config.rl import RlConfig
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.async_rollout_source import AsyncRolloutSource
from tasks.rl.named_rewards import NamedRewards, RewardSpec
from tasks.rl.rollout_source import MinibatchSettings, RolloutSettings, RolloutSource, _Refill
from tasks.rl.rollouts.group_rollout import Group, RetryWholeGroup, RolloutThreads
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.batch_source import SampledTokens

pytestmark = pytest.mark.usefixtures("without_task_runs")

NUM_TOKENS = 2
SETTINGS = RolloutSettings(
    0,
    NUM_TOKENS,
    SamplingDistribution(),
    RetryWholeGroup(max_retries=0),
    AdvantageSettings(drop_constant=True),
    refill_rounds=2,
)


class Polled(threading.Event):
    """Event that knows whether someone has asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_polled = threading.Event()

    def is_set(self) -> bool:
        self.is_polled.set()
        return super().is_set()


@dataclass(frozen=True)
class Member(Env):
    """Environment of one turn whose prompt names its group; may wait for an event."""

    number: int
    reward: float
    fails: bool
    event: threading.Event | None

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return types.ModelInput.from_ints([self.number + 1, 2]), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        while self.event and not self.event.is_set():
            await asyncio.sleep(0.01)
        if self.fails:
            raise ValueError("this one is broken")
        return StepResult(self.reward, True, types.ModelInput.empty(), [], {"named": 1.0})


@dataclass(frozen=True)
class Numbered(EnvGroupBuilder):
    """Group of two members, whose rewards are equal if it is constant."""

    number: int
    is_constant: bool
    fails: bool
    event: threading.Event | None

    async def make_envs(self) -> Sequence[Env]:
        rewards = (1.0, 1.0 if self.is_constant else 0.0)
        return [Member(self.number, reward, self.fails, self.event) for reward in rewards]


@dataclass(frozen=True)
class NumberedGroups(RLDataset):
    """Groups in batches of four; some are constant, some fail, some wait for an event."""

    num_batches: int
    constant: frozenset[int]
    broken: frozenset[int] = frozenset()
    delayed: Mapping[int, threading.Event] = field(default_factory=dict)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [
            Numbered(number, number in self.constant, number in self.broken, self.delayed.get(number))
            for number in range(4 * index, 4 * index + 4)
        ]

    def __len__(self) -> int:
        return self.num_batches


def open_source(
    dataset: NumberedGroups, settings: RolloutSettings = SETTINGS, minibatches: MinibatchSettings | None = None
) -> RolloutSource:
    return RolloutSource(dataset, None, cast(Any, Decoder()), settings, minibatches or MinibatchSettings())


def expected_steps(dataset: NumberedGroups, num_steps: int, rounds: int, sizes: Sequence[int]) -> list[list[list[int]]]:
    """Groups that each minibatch trains on: one group after another, as a reader of the docs would choose them."""
    position, num_groups, steps = 0, 4 * dataset.num_batches, list[list[list[int]]]()

    def is_good(number: int) -> bool:
        return number not in dataset.constant | dataset.broken

    for _ in range(num_steps):
        own = [
            [(position + sum(sizes[:part]) + k) % num_groups for k in range(size)] for part, size in enumerate(sizes)
        ]
        position += sum(sizes)
        for part, size in zip(own, sizes, strict=True):
            for _ in range(rounds):
                for _ in range(size - sum(map(is_good, part))):
                    part.append(position % num_groups)
                    position += 1
        steps.append([[number for number in part if is_good(number)] for part in own])
    return steps


DATA = NumberedGroups(8, frozenset({1, 2, 4, 5, 6, 9, 14, 20, 21, 22, 23}), broken=frozenset({13}))


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_constant_and_failed_groups_are_replaced_by_the_next_ones(snapshots: Any, rounds: int) -> None:
    with closing(open_source(DATA, replace(SETTINGS, refill_rounds=rounds))) as source:
        source.begin(0, 5, {})
        steps = [take(source, step, snapshots) for step in range(5)]
    assert [step.numbers for step in steps] == expected_steps(DATA, 5, rounds, [4])
    assert any(len(step.numbers[0]) < 4 for step in steps) == (rounds < 5)


def test_every_group_that_is_sampled_is_counted(snapshots: Any) -> None:
    with closing(open_source(DATA, replace(SETTINGS, refill_rounds=5))) as source:
        source.begin(0, 1, {})
        step = take(source, 0, snapshots)
    # 0 and 3 teach; 1 and 2 are replaced by 4 and 5, these by 6 and 7, and 6 by 8.
    assert step.numbers == [[0, 3, 7, 8]]
    assert step.metrics["env/all/total_episodes"] == 9 * 2
    assert step.metrics["rollout/discarded"] == pytest.approx(5 / 9)
    assert step.metrics["rollout/groups_per_trained"] == pytest.approx(9 / 4)
    # Nine groups of two members with two prompt tokens, which the second member shares with the first.
    assert step.sampled == SampledTokens(9 * 2 * 2, 9 * 2 * NUM_TOKENS, 9 * 2)


def test_minibatches_take_the_same_groups_whichever_finish_first(snapshots: Any) -> None:
    """The second minibatch of a stream is complete before the first, but takes its groups after it."""
    release = threading.Event()
    minibatches = MinibatchSettings(groups_per_batch=4, num_minibatches=2)
    with closing(open_source(replace(DATA, delayed={0: release}), minibatches=minibatches)) as source:
        source.begin(0, 3, {})
        pending = source.load(0, snapshots)
        assert not pending[1].done()  # pyright: ignore[reportAttributeAccessIssue]
        release.set()
        delayed = [numbers_of(batch.result()) for batch in pending]
    with closing(open_source(DATA, minibatches=minibatches)) as source:
        source.begin(0, 3, {})
        steps = [take(source, step, snapshots) for step in range(3)]
    assert delayed == steps[0].numbers
    assert [step.numbers for step in steps] == expected_steps(DATA, 3, 2, [2, 2])


def test_closed_source_builds_no_batch_of_groups_that_end_later(snapshots: Any) -> None:
    """It would start a task while the process ends, when Prefect cannot record it."""
    release = Polled()
    dataset = replace(DATA, delayed=dict.fromkeys(range(4), release))
    with closing(open_source(dataset, replace(SETTINGS, refill_rounds=0))) as source:
        source.begin(0, 1, {})
        (pending,) = source.load(0, snapshots)
        assert release.is_polled.wait(60), "the groups start"
    release.set()
    with pytest.raises(CancelledError, match="the run is closed"):
        pending.result()


def test_closed_threads_start_no_group() -> None:
    threads = RolloutThreads()
    assert threads.submit(lambda: 3).result() == 3
    threads.close()
    with pytest.raises(CancelledError, match="the run is closed"):
        threads.submit(lambda: 3)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_resumed_source_repeats_groups_and_tokens(snapshots: Any, num_minibatches: int) -> None:
    minibatches = MinibatchSettings(groups_per_batch=4, num_minibatches=num_minibatches)
    with closing(open_source(DATA, minibatches=minibatches)) as source:
        source.begin(0, 5, {})
        whole, states = list[Step](), list[dict[str, Any]]()
        for step in range(5):
            states.append(source.state(step))
            pending = source.load(step, snapshots)
            assert source.state(step) == states[-1], "while the step is sampled, its state is that before it"
            whole.append(finish(source, step, pending))
            assert source.state(step) == states[-1]
    for first in range(1, 5):
        with closing(open_source(DATA, minibatches=minibatches)) as source:
            source.begin(first, 5, states[first])
            resumed = [take(source, step, snapshots) for step in range(first, 5)]
        assert [step.numbers for step in resumed] == [step.numbers for step in whole[first:]]
        assert [step.tokens for step in resumed] == [step.tokens for step in whole[first:]]


def test_rollouts_of_a_skipped_step_are_charged_at_the_next_one(snapshots: Any) -> None:
    with closing(open_source(DATA, replace(SETTINGS, refill_rounds=0))) as source:
        source.begin(0, 2, {})
        for pending in source.load(0, snapshots):
            pending.result()
        source.skip(0)
        assert take(source, 1, snapshots).sampled.num_sample_tokens == 2 * 8 * NUM_TOKENS
        assert source.stop_sampling() == SampledTokens()


def test_groups_are_constant_by_the_named_rewards(snapshots: Any) -> None:
    """Every member has the named reward 1, so that no group can teach."""
    with closing(open_source(DATA, replace(SETTINGS, refill_rounds=1))) as source:
        source.rewards = NamedRewards({"named": RewardSpec()}, "sum")
        source.begin(0, 1, {})
        step = take(source, 0, snapshots)
    assert step.metrics["rollout/discarded"] == 1
    assert step.metrics["env/all/total_episodes"] == 2 * 8
    assert step.numbers == [[0]], "one group remains, with advantages of 0"


def test_groups_that_are_masked_as_a_whole_are_replaced(snapshots: Any) -> None:
    with closing(open_source(DATA, replace(SETTINGS, refill_rounds=1, mask_truncated=True))) as source:
        source.begin(0, 1, {})
        step = take(source, 0, snapshots)
    assert step.metrics["rollout/masked"] == 1, "the untrained model does not end within two tokens"
    assert step.metrics["rollout/discarded"] == 1
    assert step.metrics["env/all/total_episodes"] == 2 * 8


def test_discarded_groups_of_async_steps_count_in_the_mean_of_a_named_reward(snapshots: Any) -> None:
    with closing(AsyncRolloutSource(DATA, None, cast(Any, Decoder()), SETTINGS, MinibatchSettings(), 1)) as source:
        source.rewards = NamedRewards({"total": RewardSpec()}, "sum")
        source.begin(0, 1, {})
        step = take(source, 0, snapshots)
    assert step.metrics["rollout/discarded"] > 0
    assert step.metrics["reward/total/value"] == pytest.approx(step.metrics["env/all/reward/total"])
    assert step.metrics["reward/total/value"] == pytest.approx(step.metrics["rewards/sum"])


def test_async_steps_have_full_batches_of_groups_that_teach(snapshots: Any) -> None:
    source = AsyncRolloutSource(DATA, None, cast(Any, Decoder()), SETTINGS, MinibatchSettings(), 1)
    with closing(source):
        source.begin(0, 3, {})
        steps = [take(source, step, snapshots) for step in range(3)]
    numbers = [number for step in steps for number in step.numbers[0]]
    assert len(numbers) == len(set(numbers)) == 3 * 4
    assert not set(numbers) & (DATA.constant | DATA.broken)
    discarded = [step.metrics["rollout/discarded"] for step in steps]
    assert max(discarded) > 0
    for step in steps:
        num_groups = 4 * step.metrics["rollout/groups_per_trained"]
        assert step.metrics["rollout/discarded"] == pytest.approx(1 - 4 / num_groups)


def test_rounds_limit_the_groups_that_an_async_step_discards(snapshots: Any) -> None:
    dataset = NumberedGroups(4, constant=frozenset(range(16)))
    settings = replace(SETTINGS, refill_rounds=1)
    with closing(AsyncRolloutSource(dataset, None, cast(Any, Decoder()), settings, MinibatchSettings(), 1)) as source:
        source.begin(0, 1, {})
        step = take(source, 0, snapshots)
    assert step.metrics["env/all/total_episodes"] == 2 * 8
    assert step.metrics["rollout/discarded"] == 1


def test_refills_require_that_constant_groups_are_dropped() -> None:
    fields = {
        "run_name": "refilled",
        "model": "tiny",
        "environment": {"builder": "examples.letters:LettersBuilder"},
        "rollout": {"refill_rounds": 2},
    }
    with pytest.raises(ValueError, match=r"replaces the groups that advantage\.drop_constant drops: set drop_constant"):
        RlConfig.model_validate(fields)
    config = RlConfig.model_validate(fields | {"advantage": {"drop_constant": True}})
    settings = config.rollout.settings(0, config.advantage.settings())
    assert settings.refill_rounds == 2


def test_a_minibatch_that_fails_does_not_block_the_next_one() -> None:
    def fail() -> list[Group]:
        raise RuntimeError("the service is lost")

    source = SimpleNamespace(settings=SETTINGS, can_teach=lambda _: True)
    refill = _Refill(cast(RolloutSource, source), 0, lambda builders: [], 2, 2)
    completed: list[list[Group]] = []
    thread = threading.Thread(target=lambda: completed.append(refill.complete(1, 0, list)), daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="the service is lost"):
        refill.complete(0, 2, fail)
    thread.join(60)
    assert completed == [[]]

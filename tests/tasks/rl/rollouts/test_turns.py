"""Members of a group with several turns go on as soon as their own turn is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import tinker
from random_groups import Decoder
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, StepResult

from objectives.batch import Batch
from tasks.common.event_loop import run_coroutine
from tasks.common.task import inline_tasks
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.environments.groups import Groups
from tasks.rl.rollout_source import HeldOutEnvironments, MinibatchSettings, RolloutSettings, RolloutSource
from tasks.rl.rollouts.group_rollout import RetryWholeGroup
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.batch_source import TrainedBatch

PROMPT = [5, 6, 7]
SETTINGS = RolloutSettings(0, 4, SamplingDistribution(), RetryWholeGroup(), AdvantageSettings())


@dataclass
class Game(Env):
    """Environment of several turns."""

    num_turns: int
    reward: float
    num_played: int = 0

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return types.ModelInput.from_ints(PROMPT), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.num_played += 1
        following = types.ModelInput.from_ints([*PROMPT, *action, 9])
        return StepResult(self.reward, self.num_played == self.num_turns, following, [])


@dataclass(frozen=True)
class Games(EnvGroupBuilder):
    """Group of two members; the second may end early."""

    num_turns: int
    num_turns_of_second: int | None = None

    async def make_envs(self) -> Sequence[Env]:
        return [Game(self.num_turns, 1.0), Game(self.num_turns_of_second or self.num_turns, 0.0)]


@dataclass
class OrderedSampler:
    """Sampling client whose first request with `slow` waits until another member has asked for its second turn.

    Attributes:
        first_turns: number of samples of each request for a first turn.
    """

    client: tinker.SamplingClient
    has_slow_member: bool = False
    first_turns: list[int] = field(default_factory=list)
    second_turn: asyncio.Event = field(default_factory=asyncio.Event)

    async def sample(self, prompt: types.ModelInput, num_samples: int, params: Any, **options: Any) -> Any:
        if prompt.length > len(PROMPT):
            self.second_turn.set()
        else:
            self.first_turns.append(num_samples)
            if self.has_slow_member and len(self.first_turns) == 1:
                await asyncio.wait_for(self.second_turn.wait(), timeout=60)
        return await self.client.sample(prompt, num_samples, params)

    def save_weights_and_get_sampling_client(self) -> OrderedSampler:
        return self

    def result(self) -> OrderedSampler:
        return self


@pytest.fixture(scope="module")
def client(engine_url: str) -> Iterator[tinker.SamplingClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service.create_sampling_client(base_model="tiny").result()


@pytest.fixture(autouse=True)
def without_task_runs() -> Iterator[None]:
    with inline_tasks():
        yield


def open_source(num_turns: int) -> RolloutSource:
    dataset = Groups([Games(num_turns)] * 4, 1)
    return RolloutSource(dataset, None, cast(Any, Decoder()), SETTINGS, MinibatchSettings())


def take(source: RolloutSource, step: int, sampler: OrderedSampler) -> Batch:
    (pending,) = source.load(step, cast(Any, sampler))
    batch = pending.result()
    source.metrics(step, [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT))], {"loss/base": 0.0})
    return batch


def test_a_member_goes_on_while_another_still_samples_its_first_turn(client: tinker.SamplingClient) -> None:
    with closing(open_source(num_turns=2)) as source:
        source.begin(0, 2, {})
        merged = OrderedSampler(client)
        take(source, 0, merged)
        assert merged.first_turns == [2], "the first step does not know of the second turn yet"
        ordered = OrderedSampler(client, has_slow_member=True)
        batch = take(source, 1, ordered)
        assert ordered.first_turns == [1, 1]
        state = source.state(1)
    with closing(open_source(num_turns=2)) as source:
        source.begin(1, 2, state)
        resumed = OrderedSampler(client, has_slow_member=True)
        again = take(source, 1, resumed)
    assert resumed.first_turns == [1, 1]
    assert again.target_tokens_DT.tolist() == batch.target_tokens_DT.tolist()


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_episodes_that_end_early_and_masked_ones_resume(
    client: tinker.SamplingClient, num_minibatches: int, mask_truncated: bool
) -> None:
    """Members of one and of three turns, in the modes `sync` and `stream`, with and without masks."""
    settings = replace(SETTINGS, mask_truncated=mask_truncated)
    minibatches = MinibatchSettings(groups_per_batch=2, num_minibatches=num_minibatches)

    def run(steps: range, state: dict[str, Any]) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
        dataset = Groups([Games(3, 1), Games(1, 3)] * 4, 2)
        with closing(RolloutSource(dataset, None, cast(Any, Decoder()), settings, minibatches)) as source:
            source.begin(steps.start, 4, state)
            batches, states = list[list[list[int]]](), list[dict[str, Any]]()
            for step in steps:
                states.append(source.state(step))
                loaded = [pending.result() for pending in source.load(step, cast(Any, OrderedSampler(client)))]
                batches.append([batch.target_tokens_DT.tolist() for batch in loaded])
                trained = [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT)) for batch in loaded]
                metrics = source.metrics(step, trained, {"loss/base": 0.0})
                assert metrics["env/all/turns_per_episode"] == 2
                # The untrained model never ends a turn within four tokens, so that all rollouts are truncated.
                assert metrics.get("rollout/masked") == (1.0 if mask_truncated else None)
            return batches, states

    batches, states = run(range(3), {})
    assert len(batches[0]) == num_minibatches
    assert run(range(1, 3), states[1])[0] == batches[1:]


def test_members_with_one_turn_share_requests(client: tinker.SamplingClient) -> None:
    with closing(open_source(num_turns=1)) as source:
        source.begin(0, 2, {})
        samplers = [OrderedSampler(client), OrderedSampler(client)]
        for step, sampler in enumerate(samplers):
            take(source, step, sampler)
        assert [sampler.first_turns for sampler in samplers] == [[2], [2]]
        assert "has_several_turns" not in source.state(1)


def test_held_out_members_go_on_after_the_first_evaluation(client: tinker.SamplingClient) -> None:
    held_out = HeldOutEnvironments(Groups([Games(2)], 1), SETTINGS, cast(Any, Decoder()))
    first = OrderedSampler(client)
    metrics = run_coroutine(held_out(cast(Any, first)))
    second = OrderedSampler(client, has_slow_member=True)
    assert run_coroutine(held_out(cast(Any, second))) == metrics
    assert (first.first_turns, second.first_turns) == ([2], [1, 1])

"""The rollout of a group: fresh environments for a failure, the order of the members, and what one costs the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
import torch
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Metrics, StepResult, Trajectory

from blocks.errors import ConfigError, ServiceError
from tasks.advantages import Shape
from tasks.policy import Policy
from tasks.rollout import Group, Patient, rollout, run_coroutine
from tasks.source import Trained
from tasks.trajectories import compute_group_metrics, compute_policy_metrics, pack_groups

PROMPT = types.ModelInput.from_ints([5, 6, 7])
SHAPE = Shape(drop_constant=True)


class Broken(Exception):
    """What an environment of these tests raises."""


@dataclass
class Guess(Env):
    """Two turns; fails, hangs or ends as it is told."""

    fate: str
    reward: float
    turns: int = 0

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return PROMPT, []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        if self.fate == "fails":
            raise Broken("the sandbox is gone")
        if self.fate == "hangs":
            await asyncio.sleep(60)
        self.turns += 1
        following = types.ModelInput.from_ints([*PROMPT.to_ints(), *action, 9])
        return StepResult(self.reward, self.turns == 2, following, [])


@dataclass
class Guesses(EnvGroupBuilder):
    """A group for each attempt: the fates of its members, the last ones for every later attempt."""

    fates: Sequence[Sequence[str]]
    tag: str = "guess"
    rewards: Sequence[float] = (1.0, 0.0, 0.0)
    made: int = 0
    cleaned: int = 0
    graded: list[int] = field(default_factory=list)

    async def make_envs(self) -> Sequence[Env]:
        fates = self.fates[min(self.made, len(self.fates) - 1)]
        self.made += 1
        return [Guess(fate, reward) for fate, reward in zip(fates, self.rewards, strict=False)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.graded.append(len(trajectory_group))
        if self.tag == "ungraded":
            raise ValueError("no grader")
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        self.cleaned += 1

    def logging_tags(self) -> list[str]:
        return [self.tag]


@pytest.fixture(scope="module")
def sampler(engine_url: str) -> Iterator[tinker.SamplingClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service.create_sampling_client(base_model="tiny").result()


def play(sampler: tinker.SamplingClient, builder: Guesses, index: int = 0, **strategy: Any) -> Group:
    policy = Policy(sampler, max_tokens=4, temperature=1.0, key=(0, 0, index))
    return rollout.fn(builder, policy, Patient(**strategy), 0, index)


def tokens_of(group: Group) -> list[list[list[int]]]:
    assert group.trajectories is not None
    return [[turn.ac.tokens for turn in each.transitions] for each in group.trajectories.trajectories_G]


def test_seeds_follow_from_the_place_of_a_turn(sampler: tinker.SamplingClient) -> None:
    first, again, other = (play(sampler, Guesses([["ends"] * 3]), index) for index in (0, 0, 1))
    assert tokens_of(first) == tokens_of(again)
    turns = [str(turn) for each in (first, other) for member in tokens_of(each) for turn in member]
    assert len(set(turns)) == len(turns)


def test_groups_of_one_key_draw_by_what_they_are_asked() -> None:
    seeds: list[int] = []

    class Sampler:
        async def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Any:
            assert params.seed is not None
            seeds.append(params.seed)
            return SimpleNamespace(sequences=[SimpleNamespace(tokens=[1], logprobs=[0.0], stop_reason="stop")])

    async def ask(by_prompt: bool) -> None:
        for prompt in (PROMPT, PROMPT, types.ModelInput.from_ints([5])):
            sampler: Any = Sampler()
            (member,) = Policy(sampler, 4, 1.0, (0,), by_prompt).members(0, 1)
            await member(prompt, [])

    run_coroutine(ask(by_prompt=True))
    assert seeds[0] == seeds[1] != seeds[2]
    seeds.clear()
    run_coroutine(ask(by_prompt=False))
    assert len(set(seeds)) == 1


def test_members_that_ask_the_same_at_once_are_one_request(sampler: tinker.SamplingClient) -> None:
    """And what they are told does not depend on it."""
    requests: list[int] = []

    class Counted:
        async def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Any:
            requests.append(num_samples)
            return await sampler.sample(prompt, num_samples, params)

    async def ask(at_once: bool) -> list[list[int]]:
        counted: Any = Counted()
        members = Policy(counted, 8, 1.0, (0,)).members(0, 4)
        prompts = [PROMPT, PROMPT, types.ModelInput.from_ints([5]), PROMPT]
        asked = [member(prompt, []) for member, prompt in zip(members, prompts, strict=True)]
        answers = await asyncio.gather(*asked) if at_once else [await each for each in asked]
        return [answer.tokens for answer in answers]

    together = run_coroutine(ask(at_once=True))
    assert sorted(requests) == [1, 1, 2]
    requests.clear()
    assert run_coroutine(ask(at_once=False)) == together
    assert requests == [1, 1, 1, 1]
    assert len({str(tokens) for tokens in together}) == 4


def test_a_request_that_nobody_waits_for_is_cancelled() -> None:
    async def ask() -> tuple[bool, bool]:
        cancelled = asyncio.Event()
        sent = asyncio.Event()

        class Silent:
            async def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Any:
                sent.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

        silent: Any = Silent()
        waiting = [asyncio.ensure_future(each(PROMPT, [])) for each in Policy(silent, 4, 1.0, (0,)).members(0, 2)]
        await sent.wait()
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        early = cancelled.is_set()
        waiting[1].cancel()
        await asyncio.wait_for(cancelled.wait(), timeout=10)
        return early, cancelled.is_set()

    assert run_coroutine(ask()) == (False, True)


def test_a_group_with_a_failure_is_played_again_with_fresh_environments(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends", "fails", "hangs"], ["ends"] * 3])
    group = play(sampler, builder)
    assert (builder.made, builder.graded) == (2, [3])
    assert builder.cleaned >= 2
    assert [error.error_type for error in group.errors] == ["Broken"]
    assert len(tokens_of(group)) == 3


def test_some_members_may_be_enough(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends", "fails", "hangs"]])
    group = play(sampler, builder, min_successful=1, timeout_s=5)
    assert builder.made == 1
    assert sorted(error.error_type for error in group.errors) == ["Broken", "TimeoutError"]
    assert len(tokens_of(group)) == 1


@pytest.mark.parametrize("builder", [Guesses([["fails"] * 3]), Guesses([["ends"] * 3], tag="ungraded")])
def test_what_cannot_be_played_costs_its_group_alone(sampler: tinker.SamplingClient, builder: Guesses) -> None:
    lost, good = play(sampler, builder, max_retries=1), play(sampler, Guesses([["ends"] * 3], tag="other"), 1)
    assert lost.trajectories is None
    metrics = compute_group_metrics([lost, good])
    assert metrics["rollout_errors/groups_skipped"] == 1
    assert metrics["rollout_errors/total"] == len(lost.errors) > 0
    assert metrics["env/all/total_episodes"] == 3
    with pytest.raises(ConfigError, match="None of the 1 groups of a step could be played"):
        pack_groups([lost], SHAPE, tokenizer())


def test_the_service_is_no_environment(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends"] * 3])
    policy = Policy(sampler, max_tokens=10**6, temperature=1.0, key=(0,))
    with pytest.raises(ServiceError, match="could not sample a rollout"):
        rollout.fn(builder, policy, Patient(), 0, 0)
    assert builder.made == 1


def test_metrics_and_tags_stay_together_where_groups_are_dropped(sampler: tinker.SamplingClient) -> None:
    constant = play(sampler, Guesses([["ends"] * 3], tag="constant", rewards=(1.0, 1.0, 1.0)))
    lost = play(sampler, Guesses([["fails"] * 3], tag="lost"), max_retries=0)
    mixed = play(sampler, Guesses([["ends"] * 3], tag="mixed"), 2)
    groups = [lost, constant, mixed]
    metrics = compute_group_metrics(groups)
    assert metrics["env/constant/reward/total"] == 2
    assert metrics["env/mixed/reward/total"] == pytest.approx(2 / 3)
    assert metrics["env/all/reward/total"] == pytest.approx(4 / 3)
    assert not any(key.startswith("env/lost/") for key in metrics)

    batch = pack_groups(groups, SHAPE, tokenizer())
    assert batch.num_datums == 3
    assert batch.advantages_DT is not None
    sampled = [[token for turn in member for token in turn] for member in tokens_of(mixed)]
    assert batch.target_tokens_DT[batch.mask_DT].tolist() == [token for member in sampled for token in member]
    wanted = [advantage for advantage, each in zip((4 / 3, -2 / 3, -2 / 3), sampled, strict=True) for _ in each]
    assert batch.advantages_DT[batch.mask_DT].tolist() == pytest.approx(wanted)
    assert not bool(batch.advantages_DT[~batch.mask_DT].any())
    assert batch.sampling_logprobs_DT is not None
    figures = compute_policy_metrics([Trained(batch, batch.sampling_logprobs_DT + 0.5)])
    assert figures["optim/kl_sample_train_v1"] == pytest.approx(-0.5)
    assert figures["optim/kl_sample_train_v2"] == pytest.approx(0.125)
    assert figures["advantage/mean"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-6)


def test_where_all_earned_the_same_nothing_is_learned(sampler: tinker.SamplingClient) -> None:
    group = play(sampler, Guesses([["ends"] * 3], rewards=(1.0, 1.0, 1.0)))
    batch = pack_groups([group, group], SHAPE, tokenizer())
    assert batch.num_datums == 3
    assert batch.advantages_DT is not None
    assert torch.count_nonzero(batch.advantages_DT) == 0


def tokenizer() -> Any:
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    return Bytes()

"""Rollout of a group: seeds, merged requests, retries after failures, and packing into a batch."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tinker
import torch
from engine_process import engine_tokens
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    StepResult,
    Trajectory,
)

from blocks.errors import ConfigError, ServiceError, UserCodeError
from tasks.common.event_loop import run_coroutine
from tasks.evaluation.grading_metrics import digest_problems
from tasks.preference.judges import build_judge
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.environments.groups import Groups
from tasks.rl.rollout_source import HeldOutEnvironments, RolloutSettings
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.group_rollout import Group, RetryWholeGroup, rollout
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.rl.trajectories import compute_group_metrics, compute_policy_metrics, pack_groups
from tasks.training.batch_source import TrainedBatch
from tasks.training.held_out import GradedMetrics

PROMPT = types.ModelInput.from_ints([5, 6, 7])
SHAPE = AdvantageSettings(drop_constant=True)


class Broken(Exception):
    """Error of an environment in these tests."""


@dataclass
class Guess(Env):
    """Environment of two turns; its fate is `ends`, `unclear` (NaN metric) or one of those in `step`."""

    fate: str
    reward: float
    turns: int = 0
    text_labels: Mapping[str, str] = field(default_factory=dict)

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return PROMPT, []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        if self.fate == "fails":
            raise Broken("the sandbox is gone")
        if self.fate == "exits":
            sys.exit(3)
        if self.fate == "interrupts":
            raise KeyboardInterrupt
        if self.fate == "cancels":
            asyncio.current_task().cancel()  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0)
        if self.fate == "hangs":
            await asyncio.sleep(60)
        self.turns += 1
        following = types.ModelInput.from_ints([*PROMPT.to_ints(), *action, 9])
        metrics: Metrics = {"turn": math.nan if self.fate == "unclear" and self.turns == 1 else 1.0}
        return StepResult(self.reward, self.turns == 2, following, [], metrics)


@dataclass
class Guesses(EnvGroupBuilder):
    """Builder of a group; `fates` has the fates of its members by attempt, the last entry for all later attempts."""

    fates: Sequence[Sequence[str]]
    tag: str = "guess"
    rewards: Sequence[float] = (1.0, 0.0, 0.0)
    num_attempts: int = 0
    num_cleanups: int = 0
    graded: list[int] = field(default_factory=list)
    num_reward_errors: int = 0
    reward_error: BaseException = field(default_factory=lambda: ValueError("no grader"))
    num_env_errors: int = 0
    rules: Sequence[str] = ()
    metrics: Metrics = field(default_factory=dict)

    async def make_envs(self) -> Sequence[Env]:
        fates = self.fates[min(self.num_attempts, len(self.fates) - 1)]
        self.num_attempts += 1
        if self.num_attempts <= self.num_env_errors:
            raise ConnectionError("no game server")
        envs = [Guess(fate, reward) for fate, reward in zip(fates, self.rewards, strict=False)]
        for env, rule in zip(envs, self.rules, strict=False):
            env.text_labels = {"rules": rule}
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.graded.append(len(trajectory_group))
        if self.tag == "ungraded" or len(self.graded) <= self.num_reward_errors:
            raise self.reward_error
        return [(0.0, self.metrics) for _ in trajectory_group]

    async def cleanup(self) -> None:
        self.num_cleanups += 1

    def logging_tags(self) -> list[str]:
        return [self.tag]


@pytest.fixture(scope="module")
def sampler(engine_url: str) -> Iterator[tinker.SamplingClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service.create_sampling_client(base_model="tiny").result()


def roll_out(sampler: tinker.SamplingClient, builder: Guesses, index: int = 0, **strategy: Any) -> Group:
    policy = SnapshotCompleter(sampler, max_tokens=4, distribution=SamplingDistribution(), key=(0, 0, index))
    return rollout.fn(builder, policy, RetryWholeGroup(**strategy), 0, index)


def tokens_of(group: Group) -> list[list[list[int]]]:
    assert group.trajectories is not None
    return [[turn.ac.tokens for turn in member.transitions] for member in group.trajectories.trajectories_G]


def test_seeds_depend_on_group_member_and_turn(sampler: tinker.SamplingClient) -> None:
    first, again, other = (roll_out(sampler, Guesses([["ends"] * 3]), index) for index in (0, 0, 1))
    assert tokens_of(first) == tokens_of(again)
    turns = [str(turn) for group in (first, other) for member in tokens_of(group) for turn in member]
    assert len(set(turns)) == len(turns)


def test_held_out_groups_with_the_same_prompt_are_independent_samples(sampler: tinker.SamplingClient) -> None:
    """Each evaluation draws the same samples."""

    def evaluate() -> list[str]:
        dataset = Groups([Guesses([["ends"] * 3]) for _ in range(4)], 4)
        settings = RolloutSettings(0, 4, SamplingDistribution(), RetryWholeGroup(), SHAPE)
        evaluator = HeldOutEnvironments(dataset, settings, cast(Any, SimpleNamespace(decode=str)))
        run_coroutine(evaluator(sampler))
        return [text for evaluated in evaluator.evaluated for text in evaluated.batch.texts_D]

    texts = evaluate()
    assert len(texts) == len(set(texts)) == 4 * 3
    assert evaluate() == texts


def test_equal_prompts_of_consecutive_members_are_merged_into_one_request(sampler: tinker.SamplingClient) -> None:
    """The completions are the same with and without merging."""
    requests: list[int] = []

    class CountingSampler:
        async def sample(
            self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, **_: Any
        ) -> Any:
            requests.append(num_samples)
            return await sampler.sample(prompt, num_samples, params)

    async def sample(concurrently: bool) -> list[list[int]]:
        counting: Any = CountingSampler()
        members = SnapshotCompleter(counting, 8, SamplingDistribution(), (0,)).members(0, 4)
        prompts = [PROMPT, PROMPT, types.ModelInput.from_ints([5]), PROMPT]
        pending = [member(prompt, []) for member, prompt in zip(members, prompts, strict=True)]
        completions = await asyncio.gather(*pending) if concurrently else [await completion for completion in pending]
        return [completion.tokens for completion in completions]

    merged = run_coroutine(sample(concurrently=True))
    assert sorted(requests) == [1, 1, 2]
    requests.clear()
    assert run_coroutine(sample(concurrently=False)) == merged
    assert requests == [1, 1, 1, 1]
    assert len({str(tokens) for tokens in merged}) == 4


def test_request_is_cancelled_with_the_last_member_that_waits_for_it() -> None:
    async def cancel_members() -> tuple[bool, bool]:
        cancelled = asyncio.Event()
        sent = asyncio.Event()

        class HangingSampler:
            async def sample(
                self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, **_: Any
            ) -> Any:
                sent.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

        hanging: Any = HangingSampler()
        members = SnapshotCompleter(hanging, 4, SamplingDistribution(), (0,)).members(0, 2)
        waiting = [asyncio.ensure_future(member(PROMPT, [])) for member in members]
        await sent.wait()
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        after_first = cancelled.is_set()
        waiting[1].cancel()
        await asyncio.wait_for(cancelled.wait(), timeout=10)
        return after_first, cancelled.is_set()

    assert run_coroutine(cancel_members()) == (False, True)


def test_member_that_cancels_itself_is_a_failure_of_its_group(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends", "cancels", "ends"], ["ends"] * 3])
    group = roll_out(sampler, builder)
    assert builder.num_attempts == 2
    assert [error.error_message for error in group.errors] == ["the environment cancelled its own rollout"]
    assert len(tokens_of(group)) == 3


def test_sys_exit_of_an_environment_or_its_rewards_is_a_failure_of_its_group(sampler: tinker.SamplingClient) -> None:
    """It would otherwise end the event loop, on which all rollouts wait."""
    group = roll_out(sampler, Guesses([["ends", "exits", "ends"], ["ends"] * 3]))
    (error,) = group.errors
    assert error.error_type == "SystemExit"
    assert re.fullmatch(r"it called sys\.exit\(3\) \(test_group_rollout\.py, line \d+\)", error.error_message)
    assert len(tokens_of(group)) == 3
    group = roll_out(sampler, Guesses([["ends"] * 3], num_reward_errors=1, reward_error=SystemExit()))
    assert [error.error_message.partition(" (")[0] for error in group.errors] == ["it called sys.exit()"]
    assert len(tokens_of(group)) == 3


def test_a_keyboard_interrupt_of_an_environment_is_a_failure_of_its_group(sampler: tinker.SamplingClient) -> None:
    group = roll_out(sampler, Guesses([["ends", "interrupts", "ends"], ["ends"] * 3]))
    assert [error.error_type for error in group.errors] == ["KeyboardInterrupt"]
    assert len(tokens_of(group)) == 3


def test_errors_of_the_builder_itself(sampler: tinker.SamplingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed cleanup keeps the rewarded group, no environments fail it, and tags that fail end the run."""

    async def fail(_: Guesses) -> None:
        raise OSError("the sandbox is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Guesses, "cleanup", fail)
        group = roll_out(sampler, Guesses([["ends"] * 3]))
    assert len(tokens_of(group)) == 3
    assert [error.error_type for error in group.errors] == ["OSError"]
    group = roll_out(sampler, Guesses([[]]), max_retries=1)
    assert group.trajectories is None
    assert [error.error_message for error in group.errors] == ["make_envs returned no environments"] * 2
    monkeypatch.setattr(Guesses, "logging_tags", lambda _: {}["tag"])
    with pytest.raises(ConfigError, match=r"logging_tags of Guesses failed \(KeyError: 'tag' \(test_group_rollout.py"):
        roll_out(sampler, Guesses([["ends"] * 3]))


def test_a_reward_that_is_not_finite_is_a_failure_of_its_group(sampler: tinker.SamplingClient) -> None:
    group = roll_out(sampler, Guesses([["ends"] * 3], rewards=(1.0, math.nan, 0.0)), max_retries=0)
    assert group.trajectories is None
    assert [error.error_message for error in group.errors] == ["the reward of member 1 is nan"]
    graded = Guesses([["ends"] * 3], metrics={"style": math.inf, "unused": math.nan})
    group = roll_out(sampler, graded, max_retries=0, rewards=("style", "rare"))
    assert [error.error_message for error in group.errors] == ["the reward 'style' of member 0 is inf"]
    group = roll_out(sampler, Guesses([["ends", "unclear", "ends"]]), max_retries=0, rewards=("turn",))
    assert [error.error_message for error in group.errors] == ["the reward 'turn' of member 1 is nan"]


def test_rewards_and_metrics_are_numbers_of_python(sampler: tinker.SamplingClient) -> None:
    metrics: Any = {"count": np.int64(2), "is_right": np.bool_(True), "score": torch.tensor(0.5), "plain": 3}
    rewards: Any = (np.float32(0.5), torch.tensor(1.0), 0)
    group = roll_out(sampler, Guesses([["ends"] * 3], rewards=rewards, metrics=metrics))
    assert group.trajectories is not None
    turns = [turn for member in group.trajectories.trajectories_G for turn in member.transitions]
    numbers = [*group.trajectories.get_total_rewards(), *(turn.reward for turn in turns)]
    assert numbers == [1.0, 2.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0]
    assert {type(number) for number in numbers} == {float}
    assert json.dumps(group.trajectories.metrics_G[0]) == '{"count": 2.0, "is_right": 1.0, "score": 0.5, "plain": 3}'


@pytest.mark.parametrize("value", ["good", None, np.ones(2)])
def test_a_metric_that_is_not_a_number_is_named(sampler: tinker.SamplingClient, value: Any) -> None:
    group = roll_out(sampler, Guesses([["ends"] * 3], metrics={"style": value}), max_retries=0)
    message = f"the metric 'style' of member 0 is {value!r}, which is not a number"
    assert [error.error_message for error in group.errors] == [message]


def test_group_with_a_failure_is_retried_with_fresh_environments(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends", "fails", "hangs"], ["ends"] * 3])
    group = roll_out(sampler, builder)
    assert (builder.num_attempts, builder.graded) == (2, [3])
    assert builder.num_cleanups == 2
    assert [error.error_type for error in group.errors] == ["Broken"]
    assert len(tokens_of(group)) == 3


def test_tokens_of_failed_attempts_count(engine_url: str, sampler: tinker.SamplingClient) -> None:
    before = engine_tokens(engine_url)
    group = roll_out(sampler, Guesses([["ends"] * 3], num_reward_errors=1))
    after = engine_tokens(engine_url)
    counted = {use: after[use] - before.get(use, 0.0) for use in after}
    assert group.sampled.num_sample_tokens == counted["sampled"]
    # The members of an attempt share the prompt of their first turn.
    assert group.sampled.num_prefill_tokens - group.sampled.num_cached_tokens == counted["prompt"]
    assert group.sampled.num_sample_tokens > sum(len(turn) for member in tokens_of(group) for turn in member)


def test_group_whose_rewards_fail_is_retried_with_fresh_environments(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends"] * 3], num_reward_errors=2)
    group = roll_out(sampler, builder, max_retries=2)
    assert (builder.num_attempts, builder.graded) == (3, [3, 3, 3])
    assert tokens_of(group) != tokens_of(roll_out(sampler, Guesses([["ends"] * 3])))
    lost = roll_out(sampler, Guesses([["ends"] * 3], num_reward_errors=2), max_retries=1)
    assert lost.trajectories is None
    metrics = compute_group_metrics([group, lost])
    assert metrics["rollout_errors/ValueError"] == metrics["rollout_errors/total"] == 4
    assert metrics["rollout_errors/groups_skipped"] == 1


def test_group_whose_environments_cannot_be_created_is_retried(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends"] * 3], num_env_errors=2)
    group = roll_out(sampler, builder, max_retries=2)
    assert builder.num_attempts == len(tokens_of(group)) == 3
    lost = roll_out(sampler, Guesses([["ends"] * 3], num_env_errors=2), max_retries=1)
    assert lost.trajectories is None
    assert compute_group_metrics([group, lost])["rollout_errors/ConnectionError"] == 4


def failing_judge(row: Mapping[str, str], first: str, second: str) -> float:
    raise TimeoutError("the judge is busy")


def test_group_whose_judge_fails_is_retried(sampler: tinker.SamplingClient) -> None:
    """A judge of the user may need a network; its own error is counted."""
    judge = build_judge(f"{__name__}:failing_judge", {})
    with pytest.raises(UserCodeError, match=r"failed .TimeoutError: the judge is busy") as raised:
        asyncio.run(cast(Any, judge({}, "a", "b")))
    builder = Guesses([["ends"] * 3], num_reward_errors=1, reward_error=raised.value)
    group = roll_out(sampler, builder, max_retries=1)
    assert len(tokens_of(group)) == 3
    assert [error.error_type for error in group.errors] == ["TimeoutError"]


class TooLong(EnvGroupBuilder):
    """Group of two members, whose prompt exceeds the limit of a trajectory."""

    async def make_envs(self) -> Sequence[Env]:
        env = SimpleNamespace(initial_observation=self.initial_observation)
        return [cast(Env, env)] * 2

    async def initial_observation(self) -> InitialObservationOverflow:
        return InitialObservationOverflow(reward=-0.5, metrics={"stop/max_tokens": 1.0})


def test_held_out_batches_without_tokens_are_left_out(sampler: tinker.SamplingClient) -> None:
    settings = RolloutSettings(0, 4, SamplingDistribution(), RetryWholeGroup(), SHAPE)
    tokenizer = cast(Any, SimpleNamespace(decode=str))
    held_out = HeldOutEnvironments(Groups([Guesses([["ends"] * 2]), TooLong()], 1), settings, tokenizer)
    metrics = run_coroutine(held_out(sampler))
    assert len(held_out.evaluated) == 1
    assert metrics["test/env/all/total_episodes"] == 4


def test_held_out_group_whose_rewards_fail_is_retried(engine_url: str, sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends"] * 3], num_reward_errors=1, rules=("a", "b", "c"))
    settings = RolloutSettings(0, 4, SamplingDistribution(), RetryWholeGroup(), SHAPE)
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()
    held_out = HeldOutEnvironments(Groups([builder], 1), settings, tokenizer)
    metrics = run_coroutine(held_out(sampler))
    (evaluated,) = held_out.evaluated
    assert evaluated.batch.num_datums == 3
    assert evaluated.batch.text_labels_D == {"rules": ("a", "b", "c")}, "terms read the labels of the environments"
    assert evaluated.batch.sampling_logprobs_DT is not None
    assert torch.equal(evaluated.logprobs_DT, evaluated.batch.sampling_logprobs_DT)
    assert builder.graded == [3, 3]
    assert metrics["test/env/all/total_episodes"] == 3
    assert isinstance(metrics, GradedMetrics)
    assert metrics.scores == {"test/env/all/reward/total": [pytest.approx(metrics["test/env/all/reward/total"])]}
    again = run_coroutine(held_out(sampler))
    assert isinstance(again, GradedMetrics)
    assert again.problems == metrics.problems != digest_problems([])


def test_an_evaluation_without_a_held_out_problem_names_the_fix(sampler: tinker.SamplingClient) -> None:
    settings = RolloutSettings(0, 4, SamplingDistribution(), RetryWholeGroup(), SHAPE)
    held_out = HeldOutEnvironments(Groups([], 1), settings, cast(Any, None))
    with pytest.raises(ConfigError, match="have no full batch: add problems, or set eval_every to 0"):
        run_coroutine(held_out(sampler))


def test_service_error_of_the_rewards_is_not_retried(sampler: tinker.SamplingClient) -> None:
    class Graded(Guesses):
        async def compute_group_rewards(
            self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
        ) -> list[tuple[float, Metrics]]:
            raise ServiceError("the judge's service is gone")

    builder = Graded([["ends"] * 3])
    with pytest.raises(ServiceError, match="gone"):
        roll_out(sampler, builder)
    assert builder.num_attempts == 1


def test_min_successful_members_are_enough(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends", "fails", "hangs"]])
    group = roll_out(sampler, builder, min_successful=1, timeout_s=5)
    assert builder.num_attempts == 1
    assert sorted(error.error_type for error in group.errors) == ["Broken", "TimeoutError"]
    assert len(tokens_of(group)) == 1


@pytest.mark.parametrize("builder", [Guesses([["fails"] * 3]), Guesses([["ends"] * 3], tag="ungraded")])
def test_failed_group_does_not_affect_other_groups(sampler: tinker.SamplingClient, builder: Guesses) -> None:
    lost, good = roll_out(sampler, builder, max_retries=1), roll_out(sampler, Guesses([["ends"] * 3], tag="other"), 1)
    assert lost.trajectories is None
    metrics = compute_group_metrics([lost, good])
    assert metrics["rollout_errors/groups_skipped"] == 1
    assert metrics["rollout_errors/total"] == len(lost.errors) > 0
    assert metrics["env/all/total_episodes"] == 3
    with pytest.raises(ConfigError, match="All 1 groups of a step or of one of its minibatches failed"):
        pack_groups([lost], SHAPE, tokenizer())


def test_service_error_is_not_retried_as_an_environment_error(sampler: tinker.SamplingClient) -> None:
    builder = Guesses([["ends"] * 3])
    policy = SnapshotCompleter(sampler, max_tokens=10**6, distribution=SamplingDistribution(), key=(0,))
    with pytest.raises(ServiceError, match="could not sample a rollout"):
        rollout.fn(builder, policy, RetryWholeGroup(), 0, 0)
    assert builder.num_attempts == 1


def test_dropped_groups_do_not_shift_metrics_and_advantages(sampler: tinker.SamplingClient) -> None:
    constant = roll_out(sampler, Guesses([["ends"] * 3], tag="constant", rewards=(1.0, 1.0, 1.0)))
    lost = roll_out(sampler, Guesses([["fails"] * 3], tag="lost"), max_retries=0)
    mixed = roll_out(sampler, Guesses([["ends"] * 3], tag="mixed"), 2)
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
    expected = [value for value, tokens in zip((4 / 3, -2 / 3, -2 / 3), sampled, strict=True) for _ in tokens]
    assert batch.advantages_DT[batch.mask_DT].tolist() == pytest.approx(expected)
    assert not bool(batch.advantages_DT[~batch.mask_DT].any())
    assert batch.sampling_logprobs_DT is not None
    policy_metrics = compute_policy_metrics([TrainedBatch(batch, batch.sampling_logprobs_DT + 0.5)])
    assert policy_metrics["optim/kl_sample_train_v1"] == pytest.approx(-0.5)
    assert policy_metrics["optim/kl_sample_train_v2"] == pytest.approx(0.125)
    assert policy_metrics["advantage/mean"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def test_text_labels_of_environments_follow_their_trajectories(sampler: tinker.SamplingClient) -> None:
    plain = roll_out(sampler, Guesses([["ends"] * 3]))
    fates = [["ends", "fails", "ends"]]
    labelled = roll_out(sampler, Guesses(fates, rules=("a", "b", "c")), 1, min_successful=2, max_retries=0)
    batch = pack_groups([plain, labelled], SHAPE, tokenizer())
    assert batch.text_labels_D == {"rules": ("", "", "", "a", "c")}
    assert pack_groups([plain], SHAPE, tokenizer()).text_labels_D == {}


def test_equal_rewards_give_zero_advantages(sampler: tinker.SamplingClient) -> None:
    group = roll_out(sampler, Guesses([["ends"] * 3], rewards=(1.0, 1.0, 1.0)))
    batch = pack_groups([group, group], SHAPE, tokenizer())
    assert batch.num_datums == 3
    assert batch.advantages_DT is not None
    assert torch.count_nonzero(batch.advantages_DT) == 0


def tokenizer() -> Any:
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    return Bytes()

"""Termination policy: rewards of episodes that a limit has ended equal those of tinker-cookbook's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import tinker
from tinker import types
from tinker_cookbook.completers import StopCondition, TinkerTokenCompleter
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Metrics, StepResult, Trajectory

from flows.config.distill import DistillConfig
from flows.config.rollout import RolloutConfig, TerminationConfig
from tasks.common.event_loop import run_coroutine
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.environments.groups import Groups
from tasks.rl.rollout_source import HeldOutEnvironments
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.group_rollout import Group, rollout
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution

PROMPT = types.ModelInput.from_ints([5, 6, 7])
CLAMP = {"zero_reward_on_limit": True}
MEMBERS = (
    ("completed", 1.0, 0.5),
    ("max_turns", 1.0, 0.5),
    ("max_tokens", 0.1, 0.2),
    ("parse_error", 1.0, 0.0),
    ("rollout_timeout", -1.0, 0.5),
    ("", 1.0, 1.0),
    ("enough", 2.0, 0.0),
)
TIMED_OUT = (("rollout_timeout", 1.0, 1.0), ("rollout_timeout", -1.0, -2.0))


@dataclass(frozen=True)
class Episode(Env):
    """Environment of one turn that ends for a reason, with a reward."""

    reason: str
    reward: float

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return PROMPT, []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        metrics: Metrics = {f"stop/{self.reason}": 1.0} if self.reason else {}
        return StepResult(self.reward, True, types.ModelInput.empty(), [], metrics)


@dataclass
class Episodes(EnvGroupBuilder):
    """Group of members, each with a stop reason, the reward of its turn and its reward from the group."""

    members: Sequence[tuple[str, float, float]]
    hangs: bool = False
    num_graded: int = field(default=0, init=False)
    num_cleanups: int = field(default=0, init=False)

    async def make_envs(self) -> Sequence[Env]:
        return [Episode(reason, reward) for reason, reward, _ in self.members]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.num_graded += 1
        if self.hangs:
            await asyncio.Event().wait()
        return [(final, {"graded": 1.0}) for *_, final in self.members]

    async def cleanup(self) -> None:
        self.num_cleanups += 1


@pytest.fixture(scope="module")
def sampler(engine_url: str) -> Iterator[tinker.SamplingClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service.create_sampling_client(base_model="tiny").result()


def settings_of(**rollouts: Any) -> Any:
    return RolloutConfig.model_validate({"max_tokens": 4, "max_retries": 0} | rollouts).settings(0, AdvantageSettings())


def roll_out(sampler: tinker.SamplingClient, builder: Episodes, **termination: Any) -> Group:
    policy = SnapshotCompleter(sampler, 4, SamplingDistribution(), (0,))
    return rollout.fn(builder, policy, settings_of(termination=termination).strategy, 0, 0)


@pytest.mark.parametrize("members", [MEMBERS, TIMED_OUT])
@pytest.mark.parametrize(
    "fields",
    [
        CLAMP,
        CLAMP | {"limit_stop_reasons": ("enough", "max_turns")},
        CLAMP | {"skip_grading_on_timeout": True, "grader_timeout_seconds": 60.0},
        {"grader_timeout_seconds": 60.0},
    ],
)
def test_rewards_equal_those_of_tinker_cookbook(
    sampler: tinker.SamplingClient, members: Sequence[tuple[str, float, float]], fields: dict[str, Any]
) -> None:
    ours, theirs, held_out = Episodes(members), Episodes(members), Episodes(members)
    policy = TerminationConfig.model_validate(fields).policy()
    completer = TinkerTokenCompleter(sampler, max_tokens=4)
    expected = run_coroutine(do_group_rollout(theirs, completer, termination=policy))
    group = roll_out(sampler, ours, **fields).trajectories
    assert group is not None
    assert group.get_total_rewards() == expected.get_total_rewards()
    assert group.metrics_G == expected.metrics_G
    assert ours.num_graded == theirs.num_graded
    assert ours.num_cleanups == theirs.num_cleanups == 1

    evaluator = HeldOutEnvironments(Groups([held_out], 1), settings_of(termination=fields), tokenizer())
    metrics = run_coroutine(evaluator(sampler))
    total = expected.get_total_rewards()
    assert metrics["test/env/all/reward/total"] == pytest.approx(sum(total) / len(total))


def test_a_limit_ends_without_reward_and_the_clamp_is_exact(sampler: tinker.SamplingClient) -> None:
    group = roll_out(sampler, Episodes(MEMBERS), **CLAMP).trajectories
    assert group is not None
    assert group.get_total_rewards() == [1.5, 0.0, 0.0, 1.0, -0.5, 2.0, 2.0]
    clamped = [index for index, metrics in enumerate(group.metrics_G) if "zero_reward_on_limit" in metrics]
    assert clamped == [1, 2]


def test_a_grader_that_exceeds_its_time_limit_fails_the_attempt(sampler: tinker.SamplingClient) -> None:
    builder = Episodes(MEMBERS, hangs=True)
    group = roll_out(sampler, builder, grader_timeout_seconds=0.01)
    assert group.trajectories is None
    (error,) = group.errors
    assert error.error_type == "TimeoutError"
    assert error.error_message == "the rewards took longer than rollout.termination.grader_timeout_seconds=0.01"
    assert builder.num_graded == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no field with an effect"),
        ({"limit_stop_reasons": ("enough",)}, "no effect without zero_reward_on_limit"),
        ({"skip_grading_on_timeout": True}, "requires zero_reward_on_limit and rollout_timeout"),
        (CLAMP | {"skip_grading_on_timeout": True, "limit_stop_reasons": ("enough",)}, "requires zero_reward_on_limit"),
        ({"grader_timeout_seconds": 0}, "greater than 0"),
    ],
)
def test_settings_without_an_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TerminationConfig.model_validate(fields)


def test_distillation_refuses_a_policy() -> None:
    with pytest.raises(ValueError, match=r"rollout\.termination is a setting of rl"):
        DistillConfig.model_validate({"run_name": "d", "model": "tiny", "rollout": {"termination": CLAMP}})


def test_config_survives_a_round_trip() -> None:
    for fields in (CLAMP, {"grader_timeout_seconds": 3.0}):
        config = RolloutConfig.model_validate({"termination": fields})
        assert RolloutConfig.model_validate_json(config.model_dump_json()) == config


def tokenizer() -> Any:
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    return Bytes()

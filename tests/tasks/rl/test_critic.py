"""The critic of turns: against scikit-learn and nested sums, and its state in a resumed source."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from random_groups import Decoder, random_groups
from sklearn.linear_model import Ridge
from tinker import types
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

from blocks.errors import ConfigError
from flows.config.rl import AdvantageConfig
from objectives.batch import Batch
from tasks.rl.advantages import AdvantageSettings, compute_token_advantages, fit_critic
from tasks.rl.async_rollout_source import AsyncRolloutSource
from tasks.rl.critic import Critic, turn_features
from tasks.rl.environments.groups import Groups
from tasks.rl.named_rewards import NamedRewards, RewardSpec
from tasks.rl.rollout_source import MinibatchSettings, RolloutSettings, RolloutSource
from tasks.rl.rollouts.group_rollout import RetryWholeGroup
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.batch_source import TrainedBatch

CRITIC = Critic("tinker_flows:turn_features", turn_features, ridge=0.7, steps=3)


def settings(critic: Critic = CRITIC, **fields: float) -> AdvantageSettings:
    return AdvantageSettings("gae", critic=critic, **fields)  # pyright: ignore[reportArgumentType]


def ragged_groups(seed: int) -> list[TrajectoryGroup]:
    """Three groups of two members with one to four turns of one to five tokens."""
    lengths = random.Random(seed)
    return [
        replace(
            group,
            trajectories_G=[
                replace(member, transitions=member.transitions[: lengths.randint(1, 4)])
                for member in group.trajectories_G
            ],
        )
        for group in random_groups(seed, num_turns=4)
    ]


def returns_of(member: Trajectory, final: float, discount: float) -> list[float]:
    """Return from each turn on, as a sum over the later turns."""
    rewards = [turn.reward for turn in member.transitions]
    rewards[-1] += final
    return [
        sum(discount ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]


def table_of(groups: Sequence[TrajectoryGroup], discount: float) -> tuple[list[list[float]], list[float]]:
    """Inputs of the regression and the return of each turn, by loops over the members."""
    inputs, targets = list[list[float]](), list[float]()
    for group in groups:
        returns = [
            returns_of(*pair, discount) for pair in zip(group.trajectories_G, group.final_rewards_G, strict=True)
        ]
        for index, member in enumerate(group.trajectories_G):
            for turn, transition in enumerate(member.transitions):
                others = [own[turn] if turn < len(own) else 0.0 for at, own in enumerate(returns) if at != index]
                rewards = sum(earlier.reward for earlier in member.transitions[:turn])
                length = np.log10(1 + len(transition.ob.to_ints()))
                inputs.append([1.0, sum(others) / len(others), 1 / (1 + turn), rewards, length])
                targets.append(returns[index][turn])
    return inputs, targets


@pytest.mark.parametrize("discount", [1.0, 0.8])
@pytest.mark.parametrize("decay", [1.0, 0.6, 0.0])
def test_advantages_are_nested_sums_over_the_values_of_scikit_learn(discount: float, decay: float) -> None:
    critic, tables = CRITIC, list[tuple[list[list[float]], list[float]]]()
    for seed in range(5):
        groups = ragged_groups(seed)
        tables.append(table_of(groups, discount))
        critic = fit_critic(groups, settings(discount=discount), critic)
    weights = [(1 - 1 / 3) ** (4 - step) for step, (_, targets) in enumerate(tables) for _ in targets]
    inputs = np.array([row for rows, _ in tables for row in rows])
    targets = np.array([target for _, column in tables for target in column])
    ridge = Ridge(alpha=0.7, fit_intercept=False).fit(inputs, targets - inputs[:, 1], sample_weight=weights)
    assert critic.num_turns == pytest.approx(sum(weights))

    judged = ragged_groups(9)
    rows, returns = map(np.array, table_of(judged, discount))
    values = iter(rows[:, 1] + ridge.predict(rows))
    advantages, expected_values, sizes = list[float](), list[float](), list[int]()
    for group in judged:
        for member, final in zip(group.trajectories_G, group.final_rewards_G, strict=True):
            rewards = [turn.reward for turn in member.transitions]
            rewards[-1] += final
            own = [*(next(values) for _ in rewards), 0.0]
            expected_values += own[:-1]
            sizes += [len(turn.ac.tokens) for turn in member.transitions]
            for turn in range(len(rewards)):
                errors = [
                    rewards[later] + discount * own[later + 1] - own[later] for later in range(turn, len(rewards))
                ]
                advantages.append(sum((discount * decay) ** ahead * error for ahead, error in enumerate(errors)))
    tokens = compute_token_advantages(judged, settings(critic, discount=discount, decay=decay))
    assert tokens.advantages_T.tolist() == pytest.approx(np.repeat(advantages, sizes), abs=1e-5)
    assert tokens.values_T.tolist() == pytest.approx(np.repeat(expected_values, sizes), abs=1e-5)
    assert tokens.returns_T.tolist() == pytest.approx(np.repeat(returns, sizes), abs=1e-5)


def test_a_critic_without_data_compares_turns_within_the_group() -> None:
    groups = ragged_groups(1)
    expected = compute_token_advantages(groups, AdvantageSettings("per_turn")).advantages_T
    tokens = compute_token_advantages(groups, settings(decay=1.0))
    assert tokens.advantages_T.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert CRITIC.num_turns == 0


def test_a_group_of_one_has_the_critic_alone() -> None:
    alone = [TrajectoryGroup(group.trajectories_G[:1], group.final_rewards_G[:1], [{}]) for group in ragged_groups(1)]
    assert not compute_token_advantages(alone, settings()).values_T.any()
    critic = CRITIC
    for _ in range(30):
        critic = fit_critic(alone, settings(), replace(critic, ridge=1e-6))
    values, returns = (
        getattr(compute_token_advantages(alone, settings(critic)), name) for name in ("values_T", "returns_T")
    )
    assert torch.corrcoef(torch.stack([values, returns]))[0, 1] > 0.9


def test_members_without_a_turn_have_no_advantages() -> None:
    prompt = types.ModelInput.from_ints([5])
    empty = TrajectoryGroup([Trajectory([], prompt), Trajectory([], prompt)], [1.0, 0.0], [{}, {}])
    fitted = fit_critic(ragged_groups(0), settings(), CRITIC)
    for critic in (CRITIC, fitted):
        assert compute_token_advantages([empty], settings(critic)).advantages_T.tolist() == []
    assert fit_critic([empty], settings(), fitted) is fitted


@pytest.mark.parametrize(("concentration", "bound"), [(0.3, 1.0), (1e6, 0.9)])
def test_single_turns_have_no_more_variance_than_with_the_group_mean(concentration: float, bound: float) -> None:
    """Problems of one turn, whose chance of the reward 1 is drawn from a symmetric beta distribution."""
    generator, critic = np.random.default_rng(0), Critic("built-in", turn_features)
    prompt = types.ModelInput.from_ints([5])
    squares = dict.fromkeys(("critic", "leave_one_out"), 0.0)
    for step in range(60):
        chances = generator.beta(concentration, concentration, 16)
        rewards = (generator.random((16, 8)) < chances[:, None]).astype(float).tolist()
        groups = [
            TrajectoryGroup(
                [
                    Trajectory([Transition(prompt, TokensWithLogprobs([7], [-1.0]), reward, episode_done=True)], prompt)
                    for reward in row
                ],
                [0.0] * 8,
                [{}] * 8,
            )
            for row in rewards
        ]
        if step >= 20:
            for name, shape in (
                ("critic", settings(critic)),
                ("leave_one_out", AdvantageSettings("leave_one_out")),
            ):
                squares[name] += compute_token_advantages(groups, shape).advantages_T.square().sum().item()
        critic = fit_critic(groups, settings(), critic)
    assert squares["critic"] <= bound * squares["leave_one_out"]


@dataclass
class Echo(Env):
    """Three turns whose reward is whether the sampled token is even; one group in four fails."""

    number: int
    prompt: tuple[int, ...] = ()

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        self.prompt = (self.number + 1, 2)
        return types.ModelInput.from_ints(self.prompt), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        if self.number % 4 == 3:
            raise ValueError("this one is broken")
        self.prompt = (*self.prompt, *action, 3)
        reward = float(action[0] % 2 == 0)
        following = types.ModelInput.from_ints(self.prompt)
        return StepResult(reward, len(self.prompt) >= 11, following, [], {"odd": 1 - reward})


@dataclass(frozen=True)
class EchoGroup(EnvGroupBuilder):
    number: int

    async def make_envs(self) -> Sequence[Env]:
        await asyncio.sleep(0.02 * (self.number % 3))  # groups end in another order than they start
        return [Echo(self.number) for _ in range(3)]


def open_source(mode: str) -> RolloutSource:
    shape = settings(decay=0.9)
    rollouts = RolloutSettings(0, 2, SamplingDistribution(), RetryWholeGroup(max_retries=0), shape)
    dataset = Groups([EchoGroup(number) for number in range(24)], 4)
    if mode == "async":
        return AsyncRolloutSource(dataset, None, cast(Any, Decoder()), rollouts, MinibatchSettings(), 2)
    minibatches = MinibatchSettings(num_minibatches=2 if mode == "stream" else 1)
    return RolloutSource(dataset, None, cast(Any, Decoder()), rollouts, minibatches)


def take(source: RolloutSource, step: int, snapshots: Any) -> tuple[list[Batch], dict[str, float]]:
    batches = [pending.result() for pending in source.load(step, snapshots)]
    trained = [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT)) for batch in batches]
    return batches, source.metrics(step, trained, {"loss/base": 0.0})


def columns(batches: Sequence[Batch]) -> list[list[float]]:
    fields = [field for batch in batches for field in (batch.target_tokens_DT, batch.advantages_DT, batch.values_DT)]
    return [field.tolist() for field in fields if field is not None]


@pytest.mark.usefixtures("without_task_runs")
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_a_resumed_source_continues_with_the_same_critic(snapshots: Any, mode: str, named: bool) -> None:
    def opened() -> RolloutSource:
        source = open_source(mode)
        source.rewards = NamedRewards({"odd": RewardSpec(1.0), "total": RewardSpec(0.5)}, "sum") if named else None
        return source

    with closing(opened()) as source:
        source.begin(0, 4, {})
        steps, states = list[Any](), list[dict[str, Any]]()
        for step in range(4):
            states.append(json.loads(json.dumps(source.state(step))))
            pending = source.load(step, snapshots)
            assert source.state(step) == states[-1], "while the step is sampled, its state is that before it"
            batches = [minibatch.result() for minibatch in pending]
            trained = [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT)) for batch in batches]
            steps.append((columns(batches), source.metrics(step, trained, {"loss/base": 0.0})))
    assert [metrics["critic/num_turns"] > 0 for _, metrics in steps] == [False] + [True] * 3
    for first in (1, 3):
        with closing(opened()) as source:
            source.begin(first, 4, states[first])
            for step in range(first, 4):
                batches, metrics = take(source, step, snapshots)
                assert columns(batches) == steps[step][0]
                for key in ("value_loss", "explained_variance", "critic/num_turns"):
                    assert metrics[key] == steps[step][1][key]


@pytest.mark.usefixtures("without_task_runs")
def test_values_are_those_of_a_critic_fitted_on_earlier_steps(snapshots: Any) -> None:
    """The groups of the steps before are all it knows, whichever step starts before the metrics of the last."""
    with closing(open_source("sync")) as source:
        source.begin(0, 4, {})
        critic = CRITIC
        pending = source.load(0, snapshots)
        for step in range(4):
            batches = [minibatch.result() for minibatch in pending]
            groups = [group.trajectories for group in source._groups[step][0] if group.trajectories is not None]
            expected = compute_token_advantages(groups, settings(critic, decay=0.9))
            (batch,) = batches
            for field_DT, values_T in (
                (batch.values_DT, expected.values_T),
                (batch.advantages_DT, expected.advantages_T),
            ):
                assert field_DT is not None
                assert field_DT[batch.mask_DT].tolist() == values_T.tolist()
            critic = fit_critic(groups, settings(), critic)
            pending = source.load(step + 1, snapshots)  # before the metrics of the step, as in a run
            trained = [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT)) for batch in batches]
            source.metrics(step, trained, {"loss/base": 0.0})
            assert source.state(step + 1)["critic"] == critic.state()


@pytest.mark.usefixtures("without_task_runs")
def test_an_async_source_continues_with_the_critic_of_its_checkpoint(snapshots: Any) -> None:
    with closing(open_source("async")) as source:
        source.begin(0, 4, {})
        numbers = [take(source, step, snapshots)[1]["critic/num_turns"] for step in range(3)]
        state = json.loads(json.dumps(source.state(3)))
    assert numbers[0] == 0 < numbers[1] < numbers[2]
    with closing(open_source("async")) as source:
        source.begin(3, 4, state)
        assert source.state(3)["critic"] == state["critic"]
        _, metrics = take(source, 3, snapshots)
    assert metrics["critic/num_turns"] == state["critic"]["gram"][0][0] > numbers[2] * (1 - 1 / 3)


def test_a_critic_ignores_a_state_of_other_features() -> None:
    state = fit_critic(ragged_groups(0), settings(), CRITIC).state()
    assert CRITIC.restored(state).num_turns > 0
    assert replace(CRITIC, path="other:features").restored(state).fit is None
    assert CRITIC.restored({}).fit is None


NOT_A_FUNCTION = [1.0]


def fails(*_: object) -> list[float]:
    raise RuntimeError("no such word")


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (lambda prompt, history: [1.0] * len(history), "returned 1 numbers for one turn and 0 for another: return the"),
        (lambda prompt, history: [float("nan")], "returned the feature nan: return finite numbers"),
        (lambda prompt, history: ["long"], "failed or returned no list of numbers \\(ValueError: could not convert"),
        (lambda prompt, history: 1.0, "failed or returned no list of numbers \\(TypeError"),
        (fails, "failed or returned no list of numbers \\(RuntimeError: no such word\\): correct it"),
    ],
)
def test_invalid_features_are_named(features: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'my:features' of advantage.critic.features {message}"):
        fit_critic(random_groups(), settings(), Critic("my:features", features))


def test_invalid_settings_are_named() -> None:
    def read(**fields: Any) -> AdvantageConfig:
        return AdvantageConfig.model_validate({"estimator": "gae", "critic": {}} | fields)

    assert read().settings().critic is not None
    assert read(critic=None).settings().critic is None
    with pytest.raises(ValueError, match="critic requires the estimator gae, but estimator is per_turn"):
        read(estimator="per_turn")
    with pytest.raises(ValueError, match="drop_constant drops groups whose advantages are all zero"):
        read(drop_constant=True)
    for critic in ({"ridge": 0}, {"steps": 0}):
        with pytest.raises(ValueError, match="greater than"):
            read(critic=critic)
    for path, message in (
        ("no_such_module:features", "cannot be imported .*: give an import path such as package.module:Name"),
        ("tinker_flows:no_such_function", "cannot be imported"),
        (f"{__name__}:NOT_A_FUNCTION", "is of type list: name a function"),
    ):
        with pytest.raises(ConfigError, match=f"advantage.critic.features is '{path}', which {message}"):
            read(critic={"features": path}).settings()


def test_a_run_of_a_deployment_may_use_the_built_in_features_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "restricted")
    assert Critic.load("tinker_flows:turn_features", 1.0, 4).features is turn_features
    with pytest.raises(ConfigError, match="A run of a deployment may not import 'rollout_parts:describe_prompt'"):
        Critic.load("rollout_parts:describe_prompt", 1.0, 4)

"""Truncated completions: masks and penalties equal those of TRL and tinker-cookbook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from random_groups import Decoder, random_groups
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_strategy import RolloutResult
from tinker_cookbook.rl.types import Env, Metrics, Trajectory, TrajectoryGroup, Transition
from trl.rewards.other_rewards import get_soft_overlong_punishment

from blocks.errors import ConfigError
from flows.config.rollout import OverlongConfig, RolloutConfig
from objectives.batch import Batch, unpack
from objectives.labels import MEMBER
from tasks.common.event_loop import run_coroutine
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.named_rewards import RewardWeights
from tasks.rl.rollouts.group_rollout import Group, RetryWholeGroup, RewardedGroup
from tasks.rl.rollouts.truncation import OVERLONG, OverlongPenalty, is_truncated
from tasks.rl.trajectories import pack_groups

EOS = 2
PROMPT = types.ModelInput.from_ints([5])
GRPO = AdvantageSettings(scale=True)


def episode(tokens: Sequence[int], reward: float, stop: Any = None) -> Trajectory:
    """Episode of one turn, which is truncated if it does not end with the end token."""
    completion = TokensWithLogprobs(
        list(tokens), [-1.0] * len(tokens), stop or ("stop" if tokens[-1] == EOS else "length")
    )
    return Trajectory([Transition(PROMPT, completion, reward, episode_done=True)], PROMPT)


def group_of(*members: Trajectory) -> Group:
    return Group((), TrajectoryGroup(list(members), [0.0] * len(members), [{} for _ in members]), ())


def pack_masked(*groups: Group, settings: AdvantageSettings = GRPO, mix: RewardWeights | None = None) -> Batch:
    return pack_groups(groups, settings, cast(Any, Decoder()), mix, mask_truncated=True)


COMPLETIONS = [
    [([11, 12, EOS], 1.0), ([13, 14, 15, 16], 0.5), ([17, EOS], 0.0), ([18, 19, 20, 21], 0.0)],
    [([31, 32, 33, 34], 1.0), ([35, EOS], 1.0), ([36, EOS], 0.25), ([37, 38, EOS], 0.0)],
]


def test_masked_completions_count_in_their_group_as_in_trl() -> None:
    """TRL: normalize all rewards of a group, then zero the mask of the completions without an end token."""
    batch = pack_masked(*(group_of(*(episode(*member) for member in members)) for members in COMPLETIONS))
    flat = [member for members in COMPLETIONS for member in members]
    rewards_GN = torch.tensor([[reward for _, reward in members] for members in COMPLETIONS])
    spread = rewards_GN.std(1, keepdim=True) + 1e-4
    advantages = ((rewards_GN - rewards_GN.mean(1, keepdim=True)) / spread).flatten()
    length = max(len(tokens) for tokens, _ in flat)
    mask = torch.tensor([[float(t < len(tokens)) for t in range(length)] for tokens, _ in flat])
    truncated = torch.tensor([tokens[-1] != EOS for tokens, _ in flat])
    mask = mask * (~truncated).unsqueeze(1).int()
    logprobs = torch.full_like(mask, -1.0, requires_grad=True)
    loss = -(torch.exp(logprobs + 1.0) * advantages.unsqueeze(1) * mask).sum()
    (expected,) = torch.autograd.grad(loss, logprobs)

    assert batch.advantages_DT is not None
    assert batch.sampling_logprobs_DT is not None
    ours = batch.sampling_logprobs_DT.clone().requires_grad_()
    ratio = torch.exp(ours - batch.sampling_logprobs_DT)
    (gradient,) = torch.autograd.grad(-(ratio * batch.advantages_DT * batch.mask_DT).sum(), ours)
    assert gradient[batch.mask_DT].tolist() == pytest.approx(expected[mask > 0].tolist())
    sampled = [token for tokens, _ in flat if tokens[-1] == EOS for token in tokens]
    assert batch.target_tokens_DT[batch.mask_DT].tolist() == sampled
    assert batch.labels_D["group"].tolist() == [0, 0, 1, 1, 1]
    assert batch.labels_D[MEMBER].tolist() == [0, 2, 1, 2, 3]
    assert len(list(batch.datums)) == len(batch.texts_D) == 5


def test_an_episode_is_truncated_by_its_last_completion() -> None:
    long, short = episode([7, 8], 0.0).transitions, episode([7, EOS], 0.0).transitions
    assert [is_truncated(Trajectory(turns, PROMPT)) for turns in ([*long, *short], [*short, *long], [])] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("mix", [None, RewardWeights({"total": 1.0}, "decoupled")])
def test_one_rollout_without_advantage_remains_if_all_are_masked(mix: RewardWeights | None) -> None:
    group = group_of(episode([7, 8, 9], 1.0), episode([7, 8], 0.0))
    batch = pack_masked(group, settings=AdvantageSettings(), mix=mix)
    assert batch.num_datums == 1
    assert batch.target_tokens_DT[batch.mask_DT].tolist() == [7, 8, 9]
    assert batch.advantages_DT is not None
    assert batch.advantages_DT.tolist() == [0.0] * batch.num_tokens
    with pytest.raises(ConfigError, match="No rollout of a step has a sampled token"):
        pack_masked(group_of(Trajectory([], PROMPT)))


def test_turns_that_the_environment_masks_do_not_shift_advantages() -> None:
    """tinker-cookbook assembles the same tokens and advantages."""
    groups = random_groups(num_turns=3)
    for group, number in zip(groups, (0, 1, 2), strict=True):
        group.trajectories_G[0].transitions[number].metrics["parse_error_masked"] = 1.0
    data, _ = assemble_training_data(groups, compute_advantages(groups))
    batch = pack_groups([Group((), group, ()) for group in groups], AdvantageSettings(), cast(Any, Decoder()))
    assert batch.advantages_DT is not None
    for ours, mask, datum in zip(
        unpack(batch.advantages_DT, batch.offsets_D), unpack(batch.mask_DT, batch.offsets_D), data, strict=True
    ):
        assert torch.equal(mask, datum.loss_fn_inputs["mask"].to_torch() > 0)
        assert ours.tolist() == pytest.approx(datum.loss_fn_inputs["advantages"].to_torch().tolist(), abs=1e-6)


@pytest.mark.parametrize(("max_tokens", "length"), [(12, 5), (12, 12), (3, 1)])
def test_penalty_equals_that_of_trl(max_tokens: int, length: int) -> None:
    config = RolloutConfig.model_validate({"max_tokens": max_tokens, "truncated": {"length": length}})
    penalty = config.settings(0, AdvantageSettings()).strategy.overlong
    assert penalty is not None
    completions = [[7] * num for num in range(1, max_tokens + 1)]
    expected = get_soft_overlong_punishment(max_tokens, length)(completions)
    assert [penalty.reward(episode(tokens, 0.0, "stop")) for tokens in completions] == pytest.approx(expected)
    assert penalty.reward(episode([7] * max_tokens, 0.0)) == pytest.approx(expected[-1]) == -1


def test_penalty_of_each_turn_and_of_a_limit_of_the_environment() -> None:
    penalty = OverlongPenalty(0.5, 4, 10)
    turns = [turn for num in (6, 8, 10) for turn in episode([7] * num, 0.0, "stop").transitions]
    assert penalty.reward(Trajectory(turns, PROMPT)) == pytest.approx(-0.5 * (0 + 0.5 + 1))
    assert penalty.reward(episode([7, 8], 0.0, "length")) == -0.5, "an environment may allow fewer tokens"


def test_penalty_is_part_of_the_total_reward_and_a_metric() -> None:
    class Graded(RewardedGroup):
        async def compute_group_rewards(
            self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
        ) -> list[tuple[float, Metrics]]:
            return [(1.0, {"right": 1.0}), (0.0, {"right": 0.0})]

    trajectories = [episode([7, 8, 9, EOS], 0.0), episode([7, EOS], 0.5)]
    group = RewardedGroup(Graded(cast(Any, None)))
    strategy = RetryWholeGroup(overlong=OverlongPenalty(2.0, 2, 5))
    result = RolloutResult(trajectories, [cast(Any, None)] * 2, [])
    run_coroutine(group.reward(result, cast(Any, None), strategy))
    taken = group.take_group()
    assert taken is not None
    assert taken.trajectories is not None
    assert taken.trajectories.get_total_rewards() == pytest.approx([0.0, 0.5])
    assert taken.trajectories.metrics_G == [{"right": 1.0, OVERLONG: -1.0}, {"right": 0.0, OVERLONG: 0.0}]


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"truncated\.length=300 exceeds max_tokens=256"):
        RolloutConfig.model_validate({"truncated": {"length": 300}})
    for truncated in ("train", "mask", {"length": 3, "penalty": 0.5}):
        config = RolloutConfig.model_validate({"truncated": truncated})
        assert RolloutConfig.model_validate_json(config.model_dump_json()) == config
        settings = config.settings(0, AdvantageSettings())
        assert settings.mask_truncated == (truncated == "mask")
        assert (settings.strategy.overlong is not None) == isinstance(config.truncated, OverlongConfig)

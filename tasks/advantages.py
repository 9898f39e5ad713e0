"""From the rewards of a group to how much better than expected each sampled token did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from torch import Tensor

from objectives.advantages import centre_by_group, compute_gae, discounted_returns, leave_one_out


@dataclass(frozen=True, slots=True)
class Shape:
    """How rewards become what is trained on.

    Attributes:
        estimator: `group_mean`, `leave_one_out`, `discounted` or `gae`.
        scale: whether advantages are divided by the group's standard deviation; for `group_mean`.
        discount: what a reward is worth one token earlier; for `discounted` and `gae`.
        decay: lambda of `gae`.
        drop_constant: whether groups whose members all earned the same are left out.
        kl_coefficient: what a nat of distance from the reference costs of the reward.
    """

    estimator: str = "group_mean"
    scale: bool = False
    discount: float = 1.0
    decay: float = 0.95
    drop_constant: bool = False
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Of the sampled tokens of trajectories, end to end, float32 ``(T,)``, in units of reward.

    Attributes:
        advantages_T: how much better than expected each did.
        values_T: what was expected from it on.
        returns_T: what was earned from it on, discounted.
    """

    advantages_T: Tensor
    values_T: Tensor
    returns_T: Tensor


def compute_token_advantages(groups: Sequence[TrajectoryGroup], shape: Shape) -> TokenAdvantages:
    """What each sampled token earned against what was expected.

    The service has no critic. What is expected of a member, from each of its tokens on, is the mean of what the others
    of its group earned in all, and 0 in a group of one. `group_mean` and `leave_one_out` give every token of an answer
    the answer's advantage, by its whole reward; `discounted` its discounted return less the group's mean of those from
    the first token on; `gae` what generalized advantage estimation makes of the rewards and the expectation.
    """
    rewards_T = torch.cat([_rewards(*each) for group in groups for each in _members(group)])
    lengths = torch.tensor([_num_tokens(each) for group in groups for each, _ in _members(group)])
    group_D = torch.repeat_interleave(
        torch.arange(len(groups)), torch.tensor([len(each.trajectories_G) for each in groups])
    )
    totals_D = torch.tensor([total for group in groups for total in group.get_total_rewards()])
    offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    every_T = torch.ones(len(rewards_T), dtype=torch.bool)
    values_T = (totals_D - leave_one_out(totals_D, group_D)).where(_has_others(group_D), 0.0).repeat_interleave(lengths)
    returns_T = discounted_returns(rewards_T, every_T, offsets_D, discount=shape.discount)
    match shape.estimator:
        case "gae":
            advantages_T = compute_gae(
                rewards_T, values_T, every_T, offsets_D, discount=shape.discount, decay=shape.decay
            )
        case "discounted":
            first_D = torch.where(lengths > 0, returns_T[offsets_D[:-1].clamp(max=len(returns_T) - 1)], 0.0)
            mean_D = first_D - centre_by_group(first_D, group_D)
            advantages_T = returns_T - mean_D.repeat_interleave(lengths)
        case "leave_one_out":
            advantages_T = leave_one_out(totals_D, group_D).repeat_interleave(lengths)
        case _:
            advantages_T = centre_by_group(totals_D, group_D, scale=shape.scale).repeat_interleave(lengths)
    return TokenAdvantages(advantages_T, values_T, returns_T)


def _members(group: TrajectoryGroup) -> list[tuple[Trajectory, float]]:
    return list(zip(group.trajectories_G, group.final_rewards_G, strict=True))


def _num_tokens(trajectory: Trajectory) -> int:
    return sum(len(each.ac.tokens) for each in trajectory.transitions)


def _rewards(trajectory: Trajectory, final: float) -> Tensor:
    """Each turn's reward at its last token, and the group's own at the last of all."""
    rewards = torch.zeros(_num_tokens(trajectory))
    end = 0
    for turn in trajectory.transitions:
        end += len(turn.ac.tokens)
        if end:
            rewards[end - 1] += turn.reward
    if end:
        rewards[end - 1] += final
    return rewards


def _has_others(group_D: Tensor) -> Tensor:
    return torch.bincount(group_D)[group_D] > 1

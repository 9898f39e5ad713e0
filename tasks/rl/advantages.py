"""Per-token advantages from the rewards of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from torch import Tensor

from objectives.advantages import centre_by_group, compute_gae, discounted_returns, leave_one_out
from tasks.rl.critic import Critic, TurnStart

# Trajectory and final reward of a member of a group.
_Member = tuple[Trajectory, float]
# Advantages up to this size, relative to the rewards or their weights, count as 0, because they are float32 sums.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Settings of advantages.

    Attributes:
        estimator: `group_mean`, `leave_one_out`, `per_turn`, `discounted` or `gae`.
        scale: divide advantages by the group's standard deviation; for `group_mean`.
        discount: discount per token, or per turn with a critic; for `discounted` and `gae`.
        decay: lambda of `gae`.
        critic: critic of `gae`, which then gives all tokens of a turn one advantage; None for no critic.
        drop_constant: drop groups whose advantages are all 0; see `has_no_advantages`.
        kl_coefficient: penalty per nat of KL from the reference.
        kl_discount_factor: discount per token for the penalties of later tokens; 0 to leave them out.
    """

    estimator: str = "group_mean"
    scale: bool = False
    discount: float = 1.0
    decay: float = 0.95
    critic: Critic | None = None
    drop_constant: bool = False
    kl_coefficient: float = 0.0
    kl_discount_factor: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages of the sampled tokens of concatenated trajectories, float32 ``(T,)``, in units of reward.

    Attributes:
        advantages_T: advantage of each token.
        values_T: baseline: expected return from each token on.
        returns_T: discounted return from each token on.
    """

    advantages_T: Tensor
    values_T: Tensor
    returns_T: Tensor


def compute_token_advantages(groups: Sequence[TrajectoryGroup], settings: AdvantageSettings) -> TokenAdvantages:
    """Compute the advantage of each sampled token.

    Without a critic, the value of all tokens of a member is the mean total reward of the other members of its group, or
    0 in a group of one. The estimators are:

    - `group_mean`: total reward minus the group's mean, the same for all tokens of a member;
    - `leave_one_out`: total reward minus the mean of the other members;
    - `per_turn`: return from the token's turn on minus the mean return of the other members from the same turn on; the
      return of members that have ended is 0;
    - `discounted`: discounted return at the token minus the mean, over the group, of the return at the first token;
    - `gae`: generalized advantage estimation with the values above; with a critic, over turns instead of tokens.
    """
    if settings.critic:
        return _compute_with_critic(groups, settings, settings.critic)
    members, group_D = _members_of(groups)
    rewards_T = torch.cat([_rewards(trajectory, final) for trajectory, final in members])
    lengths = torch.tensor([_num_tokens(trajectory) for trajectory, _ in members])
    totals_D = torch.tensor([total for group in groups for total in group.get_total_rewards()])
    offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    all_T = torch.ones(len(rewards_T), dtype=torch.bool)
    values_T = (totals_D - leave_one_out(totals_D, group_D)).where(_has_others(group_D), 0.0).repeat_interleave(lengths)
    returns_T = discounted_returns(rewards_T, all_T, offsets_D, discount=settings.discount)
    match settings.estimator:
        case "gae":
            advantages_T = compute_gae(
                rewards_T, values_T, all_T, offsets_D, discount=settings.discount, decay=settings.decay
            )
        case "discounted":
            padded_T = torch.cat([returns_T, returns_T.new_zeros(1)])  # for members without tokens at the end
            first_D = torch.where(lengths > 0, padded_T[offsets_D[:-1]], 0.0)
            mean_D = first_D - centre_by_group(first_D, group_D)
            advantages_T = returns_T - mean_D.repeat_interleave(lengths)
        case "per_turn":
            turns = _compare_turns(members, group_D)
            advantages_T = _expand_turns(turns.advantages_DT, members, turns.exists_DT)
        case "leave_one_out":
            advantages_T = leave_one_out(totals_D, group_D).repeat_interleave(lengths)
        case _:
            advantages_T = centre_by_group(totals_D, group_D, scale=settings.scale).repeat_interleave(lengths)
    return TokenAdvantages(advantages_T, values_T, returns_T)


def has_no_advantages(group: TrajectoryGroup, settings: AdvantageSettings) -> bool:
    """Return whether all advantages of a group are zero, so that nothing can be learned from it."""
    totals = group.get_total_rewards()
    if settings.estimator in ("discounted", "gae", "per_turn"):  # the return depends on the token
        advantages_T = compute_token_advantages([group], settings).advantages_T
        return bool((advantages_T.abs() <= ROUNDING * max(1.0, *map(abs, totals))).all())
    return max(totals) - min(totals) <= ROUNDING * max(map(abs, totals))


class _Turns(NamedTuple):
    """Turns of trajectories, one row per trajectory, padded to the longest one.

    Attributes:
        rewards_DT: reward of each turn; that of the last one includes the group's final reward.
        returns_DT: discounted return from each turn on; 0 after the last turn.
        advantages_DT: return minus the mean return of the group's other members from the same turn on.
        exists_DT: mask of the turns that were taken.
    """

    rewards_DT: Tensor
    returns_DT: Tensor
    advantages_DT: Tensor
    exists_DT: Tensor


def _compare_turns(members: Sequence[_Member], group_D: Tensor, discount: float = 1.0) -> _Turns:
    lengths_D = torch.tensor([len(trajectory.transitions) for trajectory, _ in members])
    rewards_DT = torch.zeros(len(members), max(1, int(lengths_D.max())))
    for row, (trajectory, final) in enumerate(members):
        for index, turn in enumerate(trajectory.transitions):
            rewards_DT[row, index] = turn.reward
        rewards_DT[row, max(len(trajectory.transitions) - 1, 0)] += final
    returns_DT = rewards_DT.clone()
    for turn in reversed(range(returns_DT.shape[1] - 1)):
        returns_DT[:, turn] += discount * returns_DT[:, turn + 1]
    advantages_DT = torch.stack([leave_one_out(returns_D, group_D) for returns_D in returns_DT.T], 1)
    exists_DT = torch.arange(returns_DT.shape[1]) < lengths_D[:, None]
    return _Turns(rewards_DT, returns_DT, advantages_DT, exists_DT)


def _expand_turns(values_DT: Tensor, members: Sequence[_Member], exists_DT: Tensor) -> Tensor:
    """Give the value of each turn to its sampled tokens."""
    sizes = [len(turn.ac.tokens) for trajectory, _ in members for turn in trajectory.transitions]
    return values_DT[exists_DT].repeat_interleave(torch.tensor(sizes, dtype=torch.int64))


def fit_critic(groups: Sequence[TrajectoryGroup], settings: AdvantageSettings, critic: Critic) -> Critic:
    """Return a critic that is also fitted on the groups of a further step.

    Raises:
        ConfigError: the critic's features are invalid.
    """
    members, group_D = _members_of(groups)
    turns = _compare_turns(members, group_D, settings.discount)
    exists_DT, baselines_DT = turns.exists_DT, _baselines(turns, group_D)
    return critic.learn(_turn_starts(members), baselines_DT[exists_DT], turns.returns_DT[exists_DT])


def _compute_with_critic(
    groups: Sequence[TrajectoryGroup], settings: AdvantageSettings, critic: Critic
) -> TokenAdvantages:
    """Generalized advantage estimation over turns: each turn is one action, and all its tokens share its advantage."""
    members, group_D = _members_of(groups)
    turns = _compare_turns(members, group_D, settings.discount)
    values_DT, exists_DT = _baselines(turns, group_D), turns.exists_DT
    values_DT[exists_DT] = critic.values(_turn_starts(members), values_DT[exists_DT]).float()
    advantages_DT = compute_gae(
        turns.rewards_DT.flatten(),
        values_DT.flatten(),
        exists_DT.flatten(),
        exists_DT.shape[1] * torch.arange(len(members) + 1),
        discount=settings.discount,
        decay=settings.decay,
    ).view_as(values_DT)
    columns = (advantages_DT, values_DT, turns.returns_DT)
    return TokenAdvantages(*(_expand_turns(column_DT, members, exists_DT) for column_DT in columns))


def _baselines(turns: _Turns, group_D: Tensor) -> Tensor:
    """Mean return of the group's other members from the same turn on; 0 in a group of one."""
    return (turns.returns_DT - turns.advantages_DT).where(_has_others(group_D)[:, None], 0.0)


def _turn_starts(members: Sequence[_Member]) -> list[TurnStart]:
    return [
        (turn.ob, trajectory.transitions[:index])
        for trajectory, _ in members
        for index, turn in enumerate(trajectory.transitions)
    ]


def _members_of(groups: Sequence[TrajectoryGroup]) -> tuple[list[_Member], Tensor]:
    """Members of all groups with their final rewards, and the index of each member's group."""
    members = [member for group in groups for member in zip(group.trajectories_G, group.final_rewards_G, strict=True)]
    sizes = torch.tensor([len(group.trajectories_G) for group in groups])
    return members, torch.repeat_interleave(torch.arange(len(groups)), sizes)


def _num_tokens(trajectory: Trajectory) -> int:
    return sum(len(transition.ac.tokens) for transition in trajectory.transitions)


def _rewards(trajectory: Trajectory, final: float) -> Tensor:
    """Rewards per token: each turn's at its last token, and the group's final reward at the last token of all."""
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

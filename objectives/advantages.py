"""Advantages from rewards, per completion or per token.

Group functions take one reward per completion; return functions take one reward per token. Losses treat advantages as
constants. ``advantages_D[batch.datum_of_DT]`` expands advantages per completion to advantages per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Added to the standard deviation of a group, as in implementations of GRPO: it bounds the advantages of nearly equal
# rewards.
_LEAST_SPREAD = 1e-4


def centre_by_group(rewards_D: Tensor, group_D: Tensor, *, scale: bool = False) -> Tensor:
    """Group-centered advantages ``A_d = R_d - mean of the group``, ``(D,)``; ``scale`` divides by the deviation.

    Sources: tinker-cookbook for centering; Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.2, for
    the scale (sample standard deviation, ``n - 1``, plus 1e-4). Liu et al. 2025 (arXiv:2503.20783) advise against the
    scale, because it gives more weight to prompts that nearly all completions get right or wrong.

    Args:
        rewards_D: ``(D,)``, any unit.
        group_D: int64 ``(D,)``: any number, shared by the completions of one prompt.

    >>> centre_by_group(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3]))
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    members = _group(rewards_D, group_D)
    centred_D = members.relative_D - (members.sums / members.counts)[members.index_D]
    if not scale:
        return centred_D
    squares = torch.zeros_like(members.sums).index_add(0, members.index_D, centred_D**2)
    spread = (squares / (members.counts - 1).clamp(min=1)).sqrt()
    return centred_D / (spread + _LEAST_SPREAD)[members.index_D]


def leave_one_out(rewards_D: Tensor, group_D: Tensor) -> Tensor:
    """Leave-one-out advantages ``A_d = R_d - mean of the other rewards of the group``, ``(D,)``; 0 for a group of one.

    The baseline is independent of the completion's own reward, so the gradient is unbiased. The advantages are
    ``n / (n - 1)`` times the centered ones.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; for language models, Ahmadian et al.
    2024, "Back to Basics" (arXiv:2402.14740), section 3.

    Args: see `centre_by_group`.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3]))
    tensor([ 1., -1.,  0.])
    """
    members = _group(rewards_D, group_D)
    others_D = (members.counts - 1)[members.index_D]
    baseline_D = (members.sums[members.index_D] - members.relative_D) / others_D.clamp(min=1)
    return torch.where(others_D > 0, members.relative_D - baseline_D, 0.0)


def discounted_returns(rewards_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor, *, discount: float = 1.0) -> Tensor:
    """Discounted returns ``G_t = r_t + discount G_{t+1}`` over the sampled tokens of each datum, ``(N,)``.

    Other tokens have the return 0.

    Source: Sutton & Barto 2018, "Reinforcement Learning", equation 3.9.

    Args:
        rewards_DT: ``(N,)``: reward of each token; put the reward of a completion on its last token.
        mask_DT: bool ``(N,)``: the sampled tokens; other tokens are skipped and their rewards ignored.
        offsets_D: ``(D + 1,)``: datum ``d`` is ``[offsets_D[d], offsets_D[d + 1])``.
        discount: discount factor per token, 0 to 1.

    >>> rewards, mask = torch.tensor([0.0, 1.0, 8.0, 4.0]), torch.tensor([True, True, False, True])
    >>> discounted_returns(rewards, mask, torch.tensor([0, 4]), discount=0.5)
    tensor([1.5000, 3.0000, 0.0000, 4.0000])
    """
    return _accumulate(rewards_DT, mask_DT, offsets_D, discount)


def compute_gae(
    rewards_DT: Tensor,
    values_DT: Tensor,
    mask_DT: Tensor,
    offsets_D: Tensor,
    *,
    discount: float = 1.0,
    decay: float = 0.95,
) -> Tensor:
    """Generalized advantage estimates ``A_t = e_t + discount decay A_{t+1}``, ``(N,)``; 0 outside the mask.

    ``e_t = r_t + discount V_{t+1} - V_t`` is the TD error, with V = 0 after a datum's last sampled token. A decay of 1
    gives the return minus V, without bias; 0 gives the TD error, with low variance. The critic's training targets are
    ``A + V``.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (arXiv:1506.02438), equation 16; the default is common in PPO.

    Args:
        rewards_DT, mask_DT, offsets_D, discount: see `discounted_returns`.
        values_DT: ``(N,)``: an external critic's estimate of the return from each token on.
        decay: lambda, 0 to 1.

    >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    >>> compute_gae(rewards, values, torch.tensor([True, True]), torch.tensor([0, 2]), decay=0.5)
    tensor([0.2500, 0.5000])
    """
    next_DT = torch.zeros_like(values_DT)
    sampled = mask_DT.nonzero()[:, 0]
    datum_of = torch.bucketize(sampled, offsets_D, right=True)
    next_DT[sampled[:-1]] = torch.where(datum_of[:-1] == datum_of[1:], values_DT[sampled[1:]], 0.0)
    return _accumulate(rewards_DT + discount * next_DT - values_DT, mask_DT, offsets_D, discount * decay)


class _Groups(NamedTuple):
    """Groups of completions.

    Attributes:
        index_D: index of each completion's group, counted from 0.
        counts: size of each group.
        relative_D: each reward minus the least one of its group. Equal rewards are exactly 0, and so are their
            advantages: an optimizer such as Adam would make full steps of the rounding of a mean.
        sums: sum of `relative_D` over each group.
    """

    index_D: Tensor
    counts: Tensor
    relative_D: Tensor
    sums: Tensor


def _group(rewards_D: Tensor, group_D: Tensor) -> _Groups:
    _, index_D, counts = group_D.unique(return_inverse=True, return_counts=True)
    least = rewards_D.new_zeros(len(counts)).scatter_reduce(0, index_D, rewards_D, "amin", include_self=False)
    relative_D = rewards_D - least[index_D]
    sums = rewards_D.new_zeros(len(counts)).index_add(0, index_D, relative_D)
    return _Groups(index_D, counts, relative_D, sums)


def _accumulate(values_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor, factor: float) -> Tensor:
    """Compute ``x_t = value_t + factor x_{t+1}`` over the masked-in tokens of all datums in parallel, backwards."""
    lengths_D = torch.segment_reduce(mask_DT.to(values_DT.dtype), "sum", offsets=offsets_D, axis=0).long()
    values_D = list(values_DT[mask_DT].split(lengths_D.tolist()))
    # Reverse each datum, so that row 0 has the last tokens of all datums.
    columns = torch.nn.utils.rnn.pad_sequence([values.flip(0) for values in values_D])
    for earlier in range(1, len(columns)):
        columns[earlier] += factor * columns[earlier - 1]
    result_DT = torch.zeros_like(values_DT)
    result_DT[mask_DT] = torch.cat([columns[:length, d].flip(0) for d, length in enumerate(lengths_D.tolist())])
    return result_DT

"""From rewards to advantages: how much better than expected an answer, or each of its tokens, did.

The functions of groups take one reward per answer, those of returns one per token. All are constants to the losses that
read them. An advantage per answer becomes one per token by ``advantages_D[batch.datum_of_DT]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Keeps a group whose rewards are almost the same from being blown up; as in GRPO's implementations.
_LEAST_SPREAD = 1e-4


def centre_by_group(rewards_D: Tensor, group_D: Tensor, *, scale: bool = False) -> Tensor:
    """``A_d = R_d - mean of its group``, ``(D,)``; with ``scale``, over the group's standard deviation.

    Sources: tinker-cookbook, which centres; Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.2, for
    the scale (of the sample, ``n - 1``, plus 1e-4), which Liu et al. 2025 (arXiv:2503.20783) advise against: it
    lifts the questions that nearly all answers get right or wrong.

    Args:
        rewards_D: ``(D,)``, any unit.
        group_D: int64 ``(D,)``: answers to one question share a number, any number.

    >>> centre_by_group(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3]))
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    members = _group(rewards_D, group_D)
    centred_D = rewards_D - (members.sums / members.counts)[members.index_D]
    if not scale:
        return centred_D
    squares = torch.zeros_like(members.sums).index_add(0, members.index_D, centred_D**2)
    spread = (squares / (members.counts - 1).clamp(min=1)).sqrt()
    return centred_D / (spread + _LEAST_SPREAD)[members.index_D]


def leave_one_out(rewards_D: Tensor, group_D: Tensor) -> Tensor:
    """``A_d = R_d - mean of the others of its group``, ``(D,)``; 0 for an answer without another.

    The baseline does not depend on the answer that it is taken from, so the gradient stays unbiased; it is
    ``n / (n - 1)`` times the centred one.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; for language models, Ahmadian et al.
    2024, "Back to Basics" (arXiv:2402.14740), section 3.

    Args: as those of `centre_by_group`.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3]))
    tensor([ 1., -1.,  0.])
    """
    members = _group(rewards_D, group_D)
    others_D = (members.counts - 1)[members.index_D]
    baseline_D = (members.sums[members.index_D] - rewards_D) / others_D.clamp(min=1)
    return torch.where(others_D > 0, rewards_D - baseline_D, 0.0)


def discounted_returns(rewards_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor, *, discount: float = 1.0) -> Tensor:
    """``G_t = r_t + discount G_{t+1}`` over the marked tokens of each datum, ``(N,)``; 0 elsewhere.

    Source: Sutton & Barto 2018, "Reinforcement Learning", equation 3.9.

    Args:
        rewards_DT: ``(N,)``: what each token earned; where only the answer has a reward, at its last token.
        mask_DT: bool ``(N,)``: the sampled tokens; time passes over the others, whose rewards are not read.
        offsets_D: ``(D + 1,)``: datum ``d`` is ``[offsets_D[d], offsets_D[d + 1])``.
        discount: what a reward is worth one token earlier, 0 to 1.

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
    """Generalized advantage estimates ``A_t = e_t + discount decay A_{t+1}``, ``(N,)``; 0 outside the marked tokens.

    ``e_t = r_t + discount V_{t+1} - V_t`` is what the critic did not expect, with V = 0 behind a datum's last marked
    token. A decay of 1 gives the return less V, without bias; 0 gives e alone, with little variance. The returns to
    teach the critic are ``A + V``.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (arXiv:1506.02438), equation 16; the default is common in PPO.

    Args:
        rewards_DT: as in `discounted_returns`, and so are mask_DT, offsets_D and discount.
        values_DT: ``(N,)``: a critic's estimate of the return from each token on; not the service's, which has none.
        decay: how much a later surprise counts one token earlier, lambda, 0 to 1.

    >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    >>> compute_gae(rewards, values, torch.tensor([True, True]), torch.tensor([0, 2]), decay=0.5)
    tensor([0.2500, 0.5000])
    """
    next_DT = torch.zeros_like(values_DT)
    marked = mask_DT.nonzero()[:, 0]
    datum_of = torch.bucketize(marked, offsets_D, right=True)
    next_DT[marked[:-1]] = torch.where(datum_of[:-1] == datum_of[1:], values_DT[marked[1:]], 0.0)
    return _accumulate(rewards_DT + discount * next_DT - values_DT, mask_DT, offsets_D, discount * decay)


class _Groups(NamedTuple):
    """What group each answer is in, counted from 0, and of each group the number and the sum."""

    index_D: Tensor
    counts: Tensor
    sums: Tensor


def _group(rewards_D: Tensor, group_D: Tensor) -> _Groups:
    _, index_D, counts = group_D.unique(return_inverse=True, return_counts=True)
    sums = rewards_D.new_zeros(len(counts)).index_add(0, index_D, rewards_D)
    return _Groups(index_D, counts, sums)


def _accumulate(values_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor, factor: float) -> Tensor:
    """``x_t = value_t + factor x_{t+1}`` over the marked tokens of each datum; all datums at once, from the end."""
    lengths_D = torch.segment_reduce(mask_DT.to(values_DT.dtype), "sum", offsets=offsets_D, axis=0).long()
    marked_D = list(values_DT[mask_DT].split(lengths_D.tolist()))
    # Turned round, so that all last tokens stand in the first column.
    columns = torch.nn.utils.rnn.pad_sequence([each.flip(0) for each in marked_D])
    for earlier in range(1, len(columns)):
        columns[earlier] += factor * columns[earlier - 1]
    result_DT = torch.zeros_like(values_DT)
    result_DT[mask_DT] = torch.cat([columns[:length, d].flip(0) for d, length in enumerate(lengths_D.tolist())])
    return result_DT

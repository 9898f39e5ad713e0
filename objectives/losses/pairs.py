"""Pairs of answers to one prompt, the better one and the worse one, as their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from objectives.errors import ObjectiveError


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """What one model thinks of ``P`` pairs of answers.

    Attributes:
        chosen_P: nats, ``(P,)``: log-probability of the better answer, summed over its tokens.
        rejected_P: the same of the worse one.
        chosen_lengths_P: ``(P,)``, at least 1: number of tokens of the better answer.
        rejected_lengths_P: the same of the worse one.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_lengths_P: Tensor
    rejected_lengths_P: Tensor

    @property
    def margin_P(self) -> Tensor:
        """How much likelier the better answer is, nats, ``(P,)``."""
        return self.chosen_P - self.rejected_P

    @property
    def chosen_mean_P(self) -> Tensor:
        """Mean log-probability of a token of the better answer, nats, ``(P,)``."""
        return self.chosen_P / self.chosen_lengths_P

    @property
    def rejected_mean_P(self) -> Tensor:
        """Mean log-probability of a token of the worse answer, nats, ``(P,)``."""
        return self.rejected_P / self.rejected_lengths_P


def pair_logprobs(logprobs_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor) -> PairLogprobs:
    """The pairs of a packed batch in which each better answer stands before its worse one.

    Args:
        logprobs_DT: nats, ``(N,)``.
        mask_DT: bool ``(N,)``: the tokens of the answers.
        offsets_D: ``(2 P + 1,)``: datum ``2 p`` is the better answer of pair ``p``, datum ``2 p + 1`` the worse one.

    Raises:
        ObjectiveError: an odd number of datums, or an answer without a token.

    >>> lp, mask = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([True, True, True])
    >>> pairs = pair_logprobs(lp, mask, torch.tensor([0, 2, 3]))
    >>> pairs.margin_P, pairs.chosen_mean_P
    (tensor([1.]), tensor([-1.5000]))
    """
    lengths_D = torch.segment_reduce(mask_DT.to(logprobs_DT.dtype), "sum", offsets=offsets_D, axis=0)
    if len(lengths_D) % 2 or not bool((lengths_D > 0).all()):
        raise ObjectiveError(
            f"A batch of pairs has {len(lengths_D)} datums, {int((lengths_D == 0).sum())} of them without a token of "
            "weight: give two answers for each pair, the better one first."
        )
    sums_D = torch.segment_reduce(torch.where(mask_DT, logprobs_DT, 0.0), "sum", offsets=offsets_D, axis=0)
    return PairLogprobs(sums_D[::2], sums_D[1::2], lengths_D[::2], lengths_D[1::2])

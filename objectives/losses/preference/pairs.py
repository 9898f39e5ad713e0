"""Log-probabilities of preference pairs: a chosen and a rejected completion of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from objectives.errors import ObjectiveError


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probabilities of ``P`` pairs of completions under one model.

    Attributes:
        chosen_P: nats, ``(P,)``: log-probability of the chosen completion, summed over its tokens.
        rejected_P: nats, ``(P,)``: log-probability of the rejected completion, summed over its tokens.
        chosen_lengths_P: ``(P,)``, at least 1: number of tokens of the chosen completion.
        rejected_lengths_P: ``(P,)``, at least 1: number of tokens of the rejected completion.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_lengths_P: Tensor
    rejected_lengths_P: Tensor

    @property
    def margin_P(self) -> Tensor:
        """Log-probability of the chosen completion minus that of the rejected one, nats, ``(P,)``."""
        return self.chosen_P - self.rejected_P

    @property
    def chosen_mean_P(self) -> Tensor:
        """Mean log-probability of a token of the chosen completion, nats, ``(P,)``."""
        return self.chosen_P / self.chosen_lengths_P

    @property
    def rejected_mean_P(self) -> Tensor:
        """Mean log-probability of a token of the rejected completion, nats, ``(P,)``."""
        return self.rejected_P / self.rejected_lengths_P


def pair_logprobs(logprobs_DT: Tensor, mask_DT: Tensor, offsets_D: Tensor) -> PairLogprobs:
    """Read the pairs of a packed batch in which each chosen completion comes before its rejected one.

    Args:
        logprobs_DT: nats, ``(N,)``.
        mask_DT: bool ``(N,)``: the tokens of the completions.
        offsets_D: ``(2 P + 1,)``: datum ``2 p`` is the chosen completion of pair ``p``, datum ``2 p + 1`` the rejected.

    Raises:
        ObjectiveError: the number of datums is odd, or a completion has no tokens.

    >>> lp, mask = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([True, True, True])
    >>> pairs = pair_logprobs(lp, mask, torch.tensor([0, 2, 3]))
    >>> pairs.margin_P, pairs.chosen_mean_P
    (tensor([1.]), tensor([-1.5000]))
    """
    lengths_D = torch.segment_reduce(mask_DT.to(logprobs_DT.dtype), "sum", offsets=offsets_D, axis=0)
    if len(lengths_D) % 2 or not bool((lengths_D > 0).all()):
        raise ObjectiveError(
            f"A batch of pairs has {len(lengths_D)} datums, {int((lengths_D == 0).sum())} of them without a trained "
            "token; pass two completions per pair, the chosen one first."
        )
    sums_D = torch.segment_reduce(torch.where(mask_DT, logprobs_DT, 0.0), "sum", offsets=offsets_D, axis=0)
    return PairLogprobs(sums_D[::2], sums_D[1::2], lengths_D[::2], lengths_D[1::2])

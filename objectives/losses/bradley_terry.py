"""The loss of a reward model: the better answer should score higher."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen_scores_P: Tensor, rejected_scores_P: Tensor) -> Tensor:
    """``-log sigmoid(s_chosen - s_rejected)`` of each pair, nats, ``(P,)``.

    Source: Bradley and Terry 1952, "Rank Analysis of Incomplete Block Designs"; as a loss, Ouyang et al. 2022
    (arXiv:2203.02155), equation 1.

    Args:
        chosen_scores_P: ``(P,)``: what the model gives the better answers.
        rejected_scores_P: ``(P,)``: what it gives the worse ones.

    >>> import torch
    >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]))
    tensor([0.6931])
    """
    return -logsigmoid(chosen_scores_P - rejected_scores_P)

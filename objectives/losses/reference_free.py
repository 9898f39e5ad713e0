"""Preference losses that need no reference model: likelihoods per token, so that length does not decide."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from objectives.losses.pairs import PairLogprobs

# Beyond it the odds of an answer would be infinite.
_ALMOST_CERTAIN = math.log1p(-1e-6)


def simpo(policy: PairLogprobs, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """``-log sigmoid(beta (mean log p_chosen - mean log p_rejected) - gamma)`` of each pair, nats, ``(P,)``.

    Source: Meng et al. 2024, "SimPO" (arXiv:2405.14734), equation 6; the defaults are in the ranges of its section 3.

    Args:
        beta: scale of the reward, per nat.
        gamma: the margin that is asked for, in units of the reward.

    >>> one = torch.ones(1)
    >>> simpo(PairLogprobs(torch.tensor([-1.0]), torch.tensor([-1.5]), one, one))
    tensor([0.6931])
    """
    return -logsigmoid(beta * (policy.chosen_mean_P - policy.rejected_mean_P) - gamma)


def orpo(policy: PairLogprobs, *, weight: float = 0.1) -> Tensor:
    """``-mean log p_chosen - weight log sigmoid(log odds ratio)`` of each pair, nats, ``(P,)``.

    The odds of an answer are ``p / (1 - p)`` with ``p`` the geometric mean of its tokens' probabilities, held at
    ``1 - 1e-6`` or below.

    Source: Hong et al. 2024, "ORPO" (arXiv:2403.07691), equations 4 to 7.

    Args:
        weight: of the odds ratio beside the likelihood, lambda.

    >>> one = torch.ones(1)
    >>> orpo(PairLogprobs(torch.tensor([-1.0]), torch.tensor([-1.0]), one, one), weight=0.0)
    tensor([1.])
    """
    log_odds_ratio_P = _log_odds(policy.chosen_mean_P) - _log_odds(policy.rejected_mean_P)
    return -policy.chosen_mean_P - weight * logsigmoid(log_odds_ratio_P)


def _log_odds(mean_logprobs_P: Tensor) -> Tensor:
    logprobs_P = mean_logprobs_P.clamp(max=_ALMOST_CERTAIN)
    return logprobs_P - torch.log(-torch.expm1(logprobs_P))

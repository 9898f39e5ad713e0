"""Preference losses without a reference model: bradley_terry, simpo and orpo."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from objectives.losses.preference.pairs import PairLogprobs

# Upper bound of a mean log-probability; at 0 the odds would be infinite.
_ALMOST_CERTAIN = math.log1p(-1e-6)


def bradley_terry(chosen_scores_P: Tensor, rejected_scores_P: Tensor) -> Tensor:
    """Loss of a reward model, ``-log sigmoid(s_chosen - s_rejected)`` per pair, nats, ``(P,)``.

    Source: Bradley and Terry 1952, "Rank Analysis of Incomplete Block Designs"; as a loss, Ouyang et al. 2022
    (arXiv:2203.02155), equation 1.

    Args:
        chosen_scores_P: ``(P,)``: the model's scores of the chosen completions.
        rejected_scores_P: ``(P,)``: the model's scores of the rejected completions.

    >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]))
    tensor([0.6931])
    """
    return -logsigmoid(chosen_scores_P - rejected_scores_P)


def simpo(policy: PairLogprobs, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """SimPO, ``-log sigmoid(beta (mean log p_chosen - mean log p_rejected) - gamma)`` per pair, nats, ``(P,)``.

    The reward is a mean per token, so it does not depend on the length of a completion.

    Source: Meng et al. 2024, "SimPO" (arXiv:2405.14734), equation 6; the defaults are in the ranges of its section 3.

    Args:
        beta: scale of the reward, per nat.
        gamma: target margin, in units of the reward.

    >>> one = torch.ones(1)
    >>> simpo(PairLogprobs(torch.tensor([-1.0]), torch.tensor([-1.5]), one, one))
    tensor([0.6931])
    """
    return -logsigmoid(beta * (policy.chosen_mean_P - policy.rejected_mean_P) - gamma)


def orpo(policy: PairLogprobs, *, weight: float = 0.1) -> Tensor:
    """ORPO, ``-mean log p_chosen - weight log sigmoid(log odds ratio)`` per pair, nats, ``(P,)``.

    The odds of a completion are ``p / (1 - p)``; p is the geometric mean of its tokens' probabilities, clamped to at
    most ``1 - 1e-6``.

    Source: Hong et al. 2024, "ORPO" (arXiv:2403.07691), equations 4 to 7.

    Args:
        weight: weight of the odds ratio relative to the likelihood, lambda.

    >>> one = torch.ones(1)
    >>> orpo(PairLogprobs(torch.tensor([-1.0]), torch.tensor([-1.0]), one, one), weight=0.0)
    tensor([1.])
    """
    log_odds_ratio_P = _log_odds(policy.chosen_mean_P) - _log_odds(policy.rejected_mean_P)
    return -policy.chosen_mean_P - weight * logsigmoid(log_odds_ratio_P)


def _log_odds(mean_logprobs_P: Tensor) -> Tensor:
    logprobs_P = mean_logprobs_P.clamp(max=_ALMOST_CERTAIN)
    return logprobs_P - torch.log(-torch.expm1(logprobs_P))

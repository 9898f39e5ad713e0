"""Preferences between answers as terms: alone as base loss, or beside another one.

The two answers to one prompt share the label ``pair`` (`objectives.labels`). The better one has the label ``desirable``
1 and the other one 0; where the data has no such label, the better one is the first in the batch. Each term is a mean
over the pairs; the formulas are those of `objectives.losses`.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives import losses
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.labels import NONE, better_first, label_of
from objectives.losses import PairLogprobs
from objectives.reductions import sum_by_datum, trained_datums
from objectives.term import regularizer

Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Result = tuple[Tensor, dict[str, float]]


@regularizer("dpo", reduction="none", needs=("ref_logprobs",))
def dpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Result:
    """``-log sigmoid(beta (m - m_ref))``, nats, mean over pairs, 0-d: direct preference optimization.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; see `objectives.losses.dpo`.

    Args:
        beta: how strongly the policy is held to the reference, per nat.

    Metrics:
        accuracy: the share of pairs whose better answer has the higher reward; margin, chosen_reward,
        rejected_reward: means of ``beta (log p - log ref)``, and of its difference in a pair; length_correlation: of
        the rewards of all answers with their numbers of tokens, 0 where either is constant.
    """
    policy, reference = _pairs(outputs.logprobs_DT, batch), _reference(outputs, batch)
    return losses.dpo(policy, reference, beta=beta).mean(), _implicit_rewards(policy, reference, beta)


@regularizer("ipo", reduction="none", needs=("ref_logprobs",))
def ipo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Result:
    """``((m - m_ref) - 1 / (2 beta))^2``, mean over pairs, 0-d: a margin that has a goal.

    Source: Azar et al. 2023 (arXiv:2310.12036), equation 17; see `objectives.losses.ipo`.

    Args:
        beta: how strongly the policy is held to the reference, per nat.

    Metrics:
        as those of ``dpo``.
    """
    policy, reference = _pairs(outputs.logprobs_DT, batch), _reference(outputs, batch)
    return losses.ipo(policy, reference, beta=beta).mean(), _implicit_rewards(policy, reference, beta)


@regularizer("simpo", reduction="none")
def simpo(outputs: Outputs, batch: Batch, *, beta: Positive = 2.0, gamma: AtLeastZero = 1.0) -> Result:
    """``-log sigmoid(beta (mean log p_chosen - mean log p_rejected) - gamma)``, nats, mean over pairs, 0-d.

    Source: Meng et al. 2024 (arXiv:2405.14734), equation 6; see `objectives.losses.simpo`.

    Args:
        beta: scale of the reward, per nat.
        gamma: the margin that is asked for, in units of the reward.

    Metrics:
        as those of ``dpo``, with ``beta mean log p`` for the reward.
    """
    policy = _pairs(outputs.logprobs_DT, batch)
    value = losses.simpo(policy, beta=beta, gamma=gamma).mean()
    return value, _rewards(policy, beta * policy.chosen_mean_P, beta * policy.rejected_mean_P)


@regularizer("orpo", reduction="none")
def orpo(outputs: Outputs, batch: Batch, *, odds_weight: AtLeastZero = 0.1) -> Result:
    """``-mean log p_chosen - odds_weight log sigmoid(log odds ratio)``, nats, mean over pairs, 0-d.

    Source: Hong et al. 2024 (arXiv:2403.07691), equations 4 to 7; see `objectives.losses.orpo`.

    Args:
        odds_weight: of the odds ratio beside the likelihood, lambda.

    Metrics:
        as those of ``dpo``, with ``mean log p`` for the reward.
    """
    policy = _pairs(outputs.logprobs_DT, batch)
    value = losses.orpo(policy, weight=odds_weight).mean()
    return value, _rewards(policy, policy.chosen_mean_P, policy.rejected_mean_P)


@regularizer("bradley_terry", reduction="none")
def bradley_terry(outputs: Outputs, batch: Batch) -> Result:
    """``-log sigmoid(s_chosen - s_rejected)``, nats, mean over pairs, 0-d, with s the log-probability of a datum.

    A service has no head for a reward. A reward model is trained here on a verdict: the trained tokens of a datum are
    those of a word such as " good" behind prompt and answer, and its log-probability is the score.

    Source: Bradley and Terry 1952; Ouyang et al. 2022 (arXiv:2203.02155), equation 1; see `objectives.losses`.

    Metrics:
        as those of ``dpo``, with s for the reward.
    """
    policy = _pairs(outputs.logprobs_DT, batch)
    value = losses.bradley_terry(policy.chosen_P, policy.rejected_P).mean()
    return value, _rewards(policy, policy.chosen_P, policy.rejected_P)


@regularizer("kto", reduction="none", needs=("ref_logprobs",))
def kto(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    desirable_weight: AtLeastZero = 1.0,
    undesirable_weight: AtLeastZero = 1.0,
) -> Result:
    """``w (1 - sigmoid(+-beta (log r - z)))``, mean over the judged answers, 0-d: answers without partners.

    The label ``desirable`` is 1 or 0. z, the policy's divergence from the reference, is the mean ``log r`` of the other
    datums (no label), which are to be answers put behind prompts that they do not belong to; at least 0, and 0 without
    such a datum.

    Source: Ethayarajh et al. 2024 (arXiv:2402.01306), equations 7 and 8; see `objectives.losses.kto`.

    Args:
        beta: how strongly the policy is held to the reference, per nat.
        desirable_weight: weight of the desirable answers.
        undesirable_weight: weight of the others.

    Metrics:
        z: nats; accuracy: the share of judged answers with ``log r`` on the side of z that their verdict asks for;
        chosen_reward, rejected_reward: means of ``beta log r`` of the desirable and of the other answers, 0 where there
        are none; margin: their difference; length_correlation: as of ``dpo``.
    """
    assert outputs.ref_logprobs_DT is not None, "held by needs"
    verdict_D, trained_D = label_of(batch, "desirable"), trained_datums(batch)
    judged_D = trained_D & (verdict_D != NONE)
    if not bool(judged_D.any()):
        raise ObjectiveError(
            "no datum of a batch has a label 'desirable' and a trained token: let the dataset write 1 or 0 under "
            "'label:desirable' of the answers that were judged"
        )
    log_ratio_D = sum_by_datum(outputs.logprobs_DT - outputs.ref_logprobs_DT, batch)
    others_D = trained_D & (verdict_D == NONE)
    z = log_ratio_D.detach()[others_D].sum().clamp(min=0) / others_D.sum().clamp(min=1)
    desirable_D = verdict_D[judged_D] == 1
    rewards_D = beta * log_ratio_D.detach()[judged_D]
    value_D = losses.kto(
        log_ratio_D[judged_D],
        desirable_D,
        z,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    chosen = float(rewards_D[desirable_D].sum() / desirable_D.sum().clamp(min=1))
    rejected = float(rewards_D[~desirable_D].sum() / (~desirable_D).sum().clamp(min=1))
    lengths_D = sum_by_datum(torch.ones_like(outputs.logprobs_DT), batch)[judged_D]
    return value_D.mean(), {
        "z": float(z),
        "accuracy": float(((rewards_D > beta * z) == desirable_D).to(torch.float64).mean()),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "length_correlation": _correlation(rewards_D, lengths_D),
    }


def _pairs(logprobs_DT: Tensor, batch: Batch) -> PairLogprobs:
    pairs = better_first(batch)
    sums_D, lengths_D = sum_by_datum(logprobs_DT, batch), sum_by_datum(torch.ones_like(logprobs_DT), batch)
    first_P, second_P = pairs
    return PairLogprobs(sums_D[first_P], sums_D[second_P], lengths_D[first_P], lengths_D[second_P])


def _reference(outputs: Outputs, batch: Batch) -> PairLogprobs:
    assert outputs.ref_logprobs_DT is not None, "held by needs"
    return _pairs(outputs.ref_logprobs_DT, batch)


def _implicit_rewards(policy: PairLogprobs, reference: PairLogprobs, beta: float) -> dict[str, float]:
    chosen_P, rejected_P = policy.chosen_P - reference.chosen_P, policy.rejected_P - reference.rejected_P
    return _rewards(policy, beta * chosen_P, beta * rejected_P)


def _rewards(policy: PairLogprobs, chosen_P: Tensor, rejected_P: Tensor) -> dict[str, float]:
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    return {
        "accuracy": float((chosen_P > rejected_P).to(torch.float64).mean()),
        "margin": float((chosen_P - rejected_P).mean()),
        "chosen_reward": float(chosen_P.mean()),
        "rejected_reward": float(rejected_P.mean()),
        "length_correlation": _correlation(
            torch.cat([chosen_P, rejected_P]), torch.cat([policy.chosen_lengths_P, policy.rejected_lengths_P])
        ),
    }


def _correlation(rewards_D: Tensor, lengths_D: Tensor) -> float:
    """Pearson's, 0 where either does not vary."""
    both_2D = torch.stack([rewards_D, lengths_D]).to(torch.float64)
    apart_2D = both_2D - both_2D.mean(1, keepdim=True)
    scale = float(apart_2D.square().sum(1).prod().sqrt())
    return float(apart_2D.prod(0).sum()) / scale if scale else 0.0

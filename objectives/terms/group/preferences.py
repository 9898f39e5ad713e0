"""Preference losses as terms: usable as base loss or as regularizer.

The two completions of a prompt share the label ``pair`` (`objectives.labels`). The label ``desirable`` is 1 for the
chosen and 0 for the rejected completion; without this label, the chosen completion comes first in the batch. Each term
except `kto` is a mean over the pairs; `kto` is a mean over single completions with the label ``desirable``. The
formulas are in `objectives.losses`.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives import losses
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.labels import NONE, find_preference_pairs, get_label
from objectives.losses import PairLogprobs
from objectives.reductions import sum_by_datum, trained_datums
from objectives.term import regularizer

Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Result = tuple[Tensor, dict[str, float]]


@regularizer("dpo", reduction="none", needs=("ref_logprobs",), unit="sequence")
def dpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Result:
    """Direct preference optimization, ``-log sigmoid(beta (m - m_ref))``, nats, mean over pairs, 0-d.

    m is ``log p_chosen - log p_rejected`` under the policy, and m_ref the same under the reference.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; see `objectives.losses.dpo`.

    Args:
        beta: strength of the pull to the reference, per nat.

    Metrics:
        accuracy: share of pairs whose chosen completion has the higher reward ``beta (log p - log ref)``;
        chosen_reward, rejected_reward: mean rewards; margin: mean reward difference of a pair; length_correlation:
        Pearson correlation of reward and number of tokens over all completions, 0 if either is constant.
    """
    policy, reference = _pairs(outputs.logprobs_DT, batch), _reference(outputs, batch)
    return losses.dpo(policy, reference, beta=beta).mean(), _implicit_reward_metrics(policy, reference, beta)


@regularizer("ipo", reduction="none", needs=("ref_logprobs",), unit="sequence")
def ipo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Result:
    """Identity preference optimization, ``((m - m_ref) - 1 / (2 beta))^2``, mean over pairs, 0-d; m as in ``dpo``.

    Source: Azar et al. 2023 (arXiv:2310.12036), equation 17; see `objectives.losses.ipo`.

    Args:
        beta: strength of the pull to the reference, per nat.

    Metrics:
        see ``dpo``.
    """
    policy, reference = _pairs(outputs.logprobs_DT, batch), _reference(outputs, batch)
    return losses.ipo(policy, reference, beta=beta).mean(), _implicit_reward_metrics(policy, reference, beta)


@regularizer("simpo", reduction="none")
def simpo(outputs: Outputs, batch: Batch, *, beta: Positive = 2.0, gamma: AtLeastZero = 1.0) -> Result:
    """SimPO, ``-log sigmoid(beta (mean log p_chosen - mean log p_rejected) - gamma)``, nats, mean over pairs, 0-d.

    Source: Meng et al. 2024 (arXiv:2405.14734), equation 6; see `objectives.losses.simpo`.

    Args:
        beta: scale of the reward, per nat.
        gamma: target margin, in units of the reward.

    Metrics:
        see ``dpo``; the reward is ``beta mean log p``.
    """
    policy = _pairs(outputs.logprobs_DT, batch)
    value = losses.simpo(policy, beta=beta, gamma=gamma).mean()
    return value, _reward_metrics(policy, beta * policy.chosen_mean_P, beta * policy.rejected_mean_P)


@regularizer("orpo", reduction="none")
def orpo(outputs: Outputs, batch: Batch, *, odds_weight: AtLeastZero = 0.1) -> Result:
    """ORPO, ``-mean log p_chosen - odds_weight log sigmoid(log odds ratio)``, nats, mean over pairs, 0-d.

    Source: Hong et al. 2024 (arXiv:2403.07691), equations 4 to 7; see `objectives.losses.orpo`.

    Args:
        odds_weight: weight of the odds ratio relative to the likelihood, lambda.

    Metrics:
        see ``dpo``; the reward is ``mean log p``.
    """
    policy = _pairs(outputs.logprobs_DT, batch)
    value = losses.orpo(policy, weight=odds_weight).mean()
    return value, _reward_metrics(policy, policy.chosen_mean_P, policy.rejected_mean_P)


@regularizer("bradley_terry", reduction="none", unit="sequence")
def bradley_terry(outputs: Outputs, batch: Batch) -> Result:
    """Reward-model loss, ``-log sigmoid(s_chosen - s_rejected)``, nats, mean over pairs, 0-d.

    The score s is the log-probability of the trained tokens of a datum. A service has no reward head, so a generative
    reward model is trained: each datum ends with a verdict such as " good" after prompt and completion, and only the
    verdict's tokens are trained.

    Source: Bradley and Terry 1952; Ouyang et al. 2022 (arXiv:2203.02155), equation 1; see `objectives.losses`.

    Metrics:
        see ``dpo``; the reward is s.
    """
    policy = _pairs(outputs.logprobs_DT, batch)
    value = losses.bradley_terry(policy.chosen_P, policy.rejected_P).mean()
    return value, _reward_metrics(policy, policy.chosen_P, policy.rejected_P)


@regularizer("kto", reduction="none", needs=("ref_logprobs",), unit="sequence")
def kto(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    desirable_weight: AtLeastZero = 1.0,
    undesirable_weight: AtLeastZero = 1.0,
) -> Result:
    """Kahneman-Tversky optimization, ``w (1 - sigmoid(+-beta (log r - z)))``, mean over labelled completions, 0-d.

    w is the weight of a completion, ``log r`` its ``log p - log ref``, and the sign is plus for desirable completions.
    The completions need no partners; the label ``desirable`` is 1 or 0. z, the policy's divergence from the reference,
    is the mean ``log r`` of the datums without this label, clamped to at least 0. These datums should be completions
    paired with mismatched prompts; without such datums, z is 0.

    Source: Ethayarajh et al. 2024 (arXiv:2402.01306), equations 7 and 8; see `objectives.losses.kto`.

    Args:
        beta: strength of the pull to the reference, per nat.
        desirable_weight: weight of the desirable completions.
        undesirable_weight: weight of the undesirable completions.

    Metrics:
        z: nats; accuracy: share of labelled completions with ``log r > z`` if desirable, else ``log r <= z``;
        chosen_reward, rejected_reward: mean ``beta log r`` of the desirable and the undesirable completions, 0 without
        such completions; margin: their difference; length_correlation: see ``dpo``.
    """
    assert outputs.ref_logprobs_DT is not None, "guaranteed by needs"
    label_D, trained_D = get_label(batch, "desirable"), trained_datums(batch)
    labelled_D = trained_D & (label_D != NONE)
    if not bool(labelled_D.any()):
        raise ObjectiveError(
            "no datum of the batch has both a label 'desirable' and a trained token; set 'label:desirable' to 1 or 0 "
            "in the dataset"
        )
    log_ratio_D = sum_by_datum(outputs.logprobs_DT - outputs.ref_logprobs_DT, batch)
    unlabelled_D = trained_D & (label_D == NONE)
    z = log_ratio_D.detach()[unlabelled_D].sum().clamp(min=0) / unlabelled_D.sum().clamp(min=1)
    desirable_D = label_D[labelled_D] == 1
    rewards_D = beta * log_ratio_D.detach()[labelled_D]
    value_D = losses.kto(
        log_ratio_D[labelled_D],
        desirable_D,
        z,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    chosen = float(rewards_D[desirable_D].sum() / desirable_D.sum().clamp(min=1))
    rejected = float(rewards_D[~desirable_D].sum() / (~desirable_D).sum().clamp(min=1))
    lengths_D = sum_by_datum(torch.ones_like(outputs.logprobs_DT), batch)[labelled_D]
    return value_D.mean(), {
        "z": float(z),
        "accuracy": float(((rewards_D > beta * z) == desirable_D).to(torch.float64).mean()),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "length_correlation": _correlation(rewards_D, lengths_D),
    }


def _pairs(logprobs_DT: Tensor, batch: Batch) -> PairLogprobs:
    chosen, rejected = find_preference_pairs(batch)
    sums_D, lengths_D = sum_by_datum(logprobs_DT, batch), sum_by_datum(torch.ones_like(logprobs_DT), batch)
    return PairLogprobs(sums_D[chosen], sums_D[rejected], lengths_D[chosen], lengths_D[rejected])


def _reference(outputs: Outputs, batch: Batch) -> PairLogprobs:
    assert outputs.ref_logprobs_DT is not None, "guaranteed by needs"
    return _pairs(outputs.ref_logprobs_DT, batch)


def _implicit_reward_metrics(policy: PairLogprobs, reference: PairLogprobs, beta: float) -> dict[str, float]:
    chosen_ratio_P, rejected_ratio_P = policy.chosen_P - reference.chosen_P, policy.rejected_P - reference.rejected_P
    return _reward_metrics(policy, beta * chosen_ratio_P, beta * rejected_ratio_P)


def _reward_metrics(policy: PairLogprobs, chosen_reward_P: Tensor, rejected_reward_P: Tensor) -> dict[str, float]:
    chosen_reward_P, rejected_reward_P = chosen_reward_P.detach(), rejected_reward_P.detach()
    lengths_2P = torch.cat([policy.chosen_lengths_P, policy.rejected_lengths_P])
    return {
        "accuracy": float((chosen_reward_P > rejected_reward_P).to(torch.float64).mean()),
        "margin": float((chosen_reward_P - rejected_reward_P).mean()),
        "chosen_reward": float(chosen_reward_P.mean()),
        "rejected_reward": float(rejected_reward_P.mean()),
        "length_correlation": _correlation(torch.cat([chosen_reward_P, rejected_reward_P]), lengths_2P),
    }


def _correlation(rewards_D: Tensor, lengths_D: Tensor) -> float:
    """Pearson correlation; 0 if either input is constant."""
    values_2D = torch.stack([rewards_D, lengths_D]).to(torch.float64)
    centered_2D = values_2D - values_2D.mean(1, keepdim=True)
    scale = float(centered_2D.square().sum(1).prod().sqrt())
    return float(centered_2D.prod(0).sum()) / scale if scale else 0.0

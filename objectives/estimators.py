"""Gradient estimators for the scores of a black box, such as a solver or a simulator.

An estimator is a differentiable function of the current logprobs whose autograd gradient estimates the gradient of its
estimand, stated in its docstring. Scores are constants and are minimized: higher is worse. Completions are compared
only with completions of the same prompt (`objectives.labels.number_prompts`), so a constant added to all scores of a
prompt changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.labels import MEMBER, NONE, number_prompts
from objectives.losses.policy.ratios import summed_log_ratios
from objectives.reductions import mean_by_datum, sum_by_datum, trained_datums

EstimatorName = Literal["score_function", "minimum_risk", "minimum_risk_mean", "unlikelihood"]
"""Name of an estimator."""

EstimatorChoice = Literal["auto", "score_function", "minimum_risk", "minimum_risk_mean", "unlikelihood"]
"""Name of an estimator, or ``"auto"`` for `choose_estimator`."""

# Above this logprob, -log(1 - p) continues as its tangent with slope 1e4 instead of growing to infinity.
_ALMOST_CERTAIN = math.log1p(-1e-4)

Alpha = Annotated[float, Field(gt=0)]


def score_function(outputs: Outputs, batch: Batch, scores_D: Tensor) -> Tensor:
    """Score-function (REINFORCE) estimate of the expected score; for samples of the model.

    Estimand: the gradient of the expected score of a completion under the model, averaged over the prompts. The
    estimate is unbiased, also if the sampler is older than the model::

        E = mean_prompts mean_d [s_d + r_d (s_d - b_d)],   r_d = exp(sum_t (logprob_dt - sampling_logprob_dt))

    ``b_d`` is the mean score of the prompt's other samples. A prompt with a single sample has no baseline and trains
    nothing. The baseline excludes all datums with the same label ``member``, which are turns of one conversation; a
    datum without this label is a conversation of its own.

    Sources: Williams 1992, "Simple statistical gradient-following algorithms"; the leave-one-out baseline of Kool et
    al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!".

    Args:
        scores_D: ``(D,)``, any unit; E has the same unit.

    Raises:
        ObjectiveError: the data is fixed and has no sampling logprobs.
    """
    if outputs.sampling_logprobs_DT is None:
        raise ObjectiveError(fixed_data_refusal())
    log_ratios_D = summed_log_ratios(outputs.logprobs_DT, outputs.sampling_logprobs_DT, batch.mask_DT, batch.offsets_D)
    trained_D = trained_datums(batch)
    scores_D, log_ratios_D = scores_D[trained_D], log_ratios_D[trained_D]
    prompts_D = number_prompts(batch)[trained_D]
    own_numbers_D = -torch.arange(1, len(scores_D) + 1) + NONE
    members_D = batch.labels_D[MEMBER][trained_D] if MEMBER in batch.labels_D else own_numbers_D
    members_D = torch.where(members_D == NONE, own_numbers_D, members_D)
    is_other_DD = (prompts_D[:, None] == prompts_D) & (members_D[:, None] != members_D)
    num_others_D = is_other_DD.sum(1)
    # A mean of differences, because a constant of the prompt cancels in each of them.
    differences_DD = torch.where(is_other_DD, scores_D[:, None] - scores_D, 0.0)
    advantages_D = differences_DD.sum(1) / num_others_D.clamp(min=1)
    # A ratio may overflow, and infinity times an advantage of 0 would be NaN.
    ratios_D = torch.where(advantages_D != 0, log_ratios_D, 0.0).exp()
    return _mean_over_prompts(scores_D + ratios_D * advantages_D, prompts_D)


def minimum_risk(outputs: Outputs, batch: Batch, scores_D: Tensor, *, alpha: Alpha = 1.0) -> Tensor:
    """Expected score under the model, renormalized over each prompt's completions; for fixed data.

    Estimand: the gradient of ``R = mean_prompts S`` with ``S = sum_d p_d s_d`` and
    ``p = softmax(alpha sum_t logprob_dt)`` over the prompt's completions in the batch. It is exact:
    ``dR/dlogprob_dt = alpha p_d (s_d - S) / P`` for ``P`` prompts. If the completions are all possible ones, R with
    ``alpha = 1`` is the expected score under the model.

    Source: Shen et al. 2016, "Minimum Risk Training for Neural Machine Translation" (arXiv:1512.02433), equations 6
    to 8.

    Args:
        scores_D: ``(D,)``, any unit; R has the same unit.
        alpha: sharpness of p, per nat. The logprobs of long completions differ by many nats; a low alpha then keeps p
            from concentrating on one completion. Shen et al. use 0.005.
    """
    return _risk(alpha * sum_by_datum(outputs.logprobs_DT, batch), batch, scores_D)


def minimum_risk_mean(outputs: Outputs, batch: Batch, scores_D: Tensor, *, alpha: Alpha = 1.0) -> Tensor:
    """Minimum risk with the mean instead of the sum of a completion's logprobs; for fixed data.

    Estimand: the gradient of ``R = mean_prompts sum_d p_d s_d`` with ``p = softmax(alpha mean_t logprob_dt)`` over the
    prompt's completions in the batch. It is exact, and independent of length. R is not an expected score under the
    model: p compares completions per token.

    Args:
        scores_D: ``(D,)``, any unit; R has the same unit.
        alpha: sharpness of p, per nat of a token: near 0 all completions are equally likely, at high values only the
            likeliest counts.
    """
    return _risk(alpha * mean_by_datum(outputs.logprobs_DT, batch), batch, scores_D)


def batch_risk(outputs: Outputs, batch: Batch, scores_D: Tensor, *, alpha: Alpha = 1.0) -> Tensor:
    """`minimum_risk` of release 0.1, which compares all datums of a batch; for runs that 0.1 started."""
    mean_logprobs_D = mean_by_datum(outputs.logprobs_DT, batch)
    probabilities_D = torch.where(trained_datums(batch), alpha * mean_logprobs_D, -math.inf).softmax(0)
    return (probabilities_D * scores_D).sum()


def unlikelihood(outputs: Outputs, batch: Batch, scores_DT: Tensor) -> Tensor:
    """Unlikelihood of flagged tokens, ``-s_dt log(1 - p_dt)``, nats, ``(N,)``; for fixed data.

    Estimand: the exact gradient of this loss. Above ``p = 1 - 1e-4`` the curve continues as its tangent, so the
    gradient is finite for ``p = 1``. The term's reduction applies to the result.

    Source: Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training" (arXiv:1908.04319).

    Args:
        scores_DT: ``(N,)``, at least 0: penalty weight of each token, 0 or 1 for flags.
    """
    logprobs_DT = outputs.logprobs_DT
    uncertain_DT = logprobs_DT.clamp(max=_ALMOST_CERTAIN)
    curve_DT = -torch.log(-torch.expm1(uncertain_DT))
    slope = math.exp(_ALMOST_CERTAIN) / -math.expm1(_ALMOST_CERTAIN)
    tangent_DT = slope * (logprobs_DT - _ALMOST_CERTAIN) - math.log(-math.expm1(_ALMOST_CERTAIN))
    # Select one of the two: in a sum, float32 rounding of the tangent would hide the gradient of a small p.
    return scores_DT * torch.where(logprobs_DT > _ALMOST_CERTAIN, tangent_DT, curve_DT)


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimator with the properties that its users depend on.

    Attributes:
        function: ``(outputs, batch, scores, **params) -> value``.
        per_token: True if the scores are per token, ``(N,)``; False if they are per datum, ``(D,)``.
        unit: what the gradient at a token shrinks with: ``"token"`` for the number of tokens in the batch,
            ``"sequence"`` for the number of datums (`objectives.term_weights.scale`).
    """

    function: Callable[..., Tensor]
    per_token: bool
    unit: Literal["token", "sequence"]


BATCH_RISK = "batch_risk"

ESTIMATORS: dict[str, Estimator] = {
    "score_function": Estimator(score_function, per_token=False, unit="sequence"),
    "minimum_risk": Estimator(minimum_risk, per_token=False, unit="sequence"),
    "minimum_risk_mean": Estimator(minimum_risk_mean, per_token=False, unit="token"),
    "unlikelihood": Estimator(unlikelihood, per_token=True, unit="token"),
    BATCH_RISK: Estimator(batch_risk, per_token=False, unit="token"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Estimator of a scored term, ``None`` if no estimator fits the data, and the reason as a clause."""

    estimator: EstimatorName | None
    reason: str


def choose_estimator(batch: Batch) -> Choice:
    """Choose the estimator of scores per datum from the data.

    Samples of the model, which have sampling logprobs, take `score_function`. Fixed data with several completions of a
    prompt takes `minimum_risk`. Other fixed data has no estimator, because there is nothing to compare a score with.

    >>> fixed = Batch(torch.tensor([7, 1, 7, 2]), torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0, 2, 4]))
    >>> choose_estimator(fixed).estimator
    'minimum_risk'
    """
    if batch.sampling_logprobs_DT is not None:
        return Choice("score_function", "the completions are samples of the model")
    if num_compared(batch):
        return Choice("minimum_risk", "the data has several completions of a prompt")
    return Choice(None, "every prompt of the data has one completion")


def num_compared(batch: Batch, scores_D: Tensor | None = None) -> int:
    """Count the prompts with several completions; with scores, those whose scores differ."""
    trained_D = trained_datums(batch)
    prompts_D = number_prompts(batch)[trained_D]
    if scores_D is None:
        return int((prompts_D.bincount() > 1).sum())
    scores_D = scores_D[trained_D]
    lowest_P = torch.full((num_prompts(batch),), math.inf, dtype=scores_D.dtype)
    highest_P = -lowest_P
    lowest_P.scatter_reduce_(0, prompts_D, scores_D, "amin")
    highest_P.scatter_reduce_(0, prompts_D, scores_D, "amax")
    return int((highest_P > lowest_P).sum())


def num_prompts(batch: Batch) -> int:
    """Count the prompts of a batch, including those without a trained token."""
    return int(number_prompts(batch).max()) + 1


def fixed_data_refusal() -> str:
    """Return the error clause for the score function on fixed data."""
    return (
        "its estimator 'score_function' needs samples of the model with sampling logprobs, because its loss has no "
        "lower bound on fixed data; use 'auto', 'minimum_risk' or 'unlikelihood'"
    )


def _risk(logits_D: Tensor, batch: Batch, scores_D: Tensor) -> Tensor:
    """Mean over the prompts of the score expected under the softmax of each prompt's logits."""
    trained_D = trained_datums(batch)
    logits_D, scores_D = logits_D[trained_D], scores_D[trained_D]
    prompts_D = number_prompts(batch)[trained_D]
    is_same_DD = prompts_D[:, None] == prompts_D
    probabilities_D = torch.where(is_same_DD, logits_D, -math.inf).log_softmax(1).diagonal().exp()
    # Expectation of the difference to the mean, because rounding errors grow with the size of the scores.
    sizes_D = is_same_DD.sum(1)
    means_D = torch.where(is_same_DD, scores_D, 0.0).sum(1) / sizes_D
    return _mean_over_prompts(sizes_D * probabilities_D * (scores_D - means_D) + means_D, prompts_D)


def _mean_over_prompts(values_D: Tensor, prompts_D: Tensor) -> Tensor:
    """Mean over the prompts of the mean over each prompt's values, 0-d."""
    sizes_D = prompts_D.bincount()[prompts_D]
    return (values_D / sizes_D).sum() / len(prompts_D.unique())

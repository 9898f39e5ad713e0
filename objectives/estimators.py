"""From scores of a black box to a gradient: a solver, a homology or a simulator has none of its own.

Each estimator is a differentiable function of the current logprobs, so that autograd and finite differences
agree on it. Scores are constants, and are minimised: higher is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.reductions import mean_by_datum, sum_by_datum, trained_datums

# Beyond it, -log(1 - p) goes on as a straight line: its slope is 1e4, where it would soon be infinite.
_ALMOST_CERTAIN = math.log1p(-1e-4)


def minimum_risk(
    outputs: Outputs, batch: Batch, scores_D: Tensor, *, alpha: Annotated[float, Field(gt=0)] = 1.0
) -> Tensor:
    """Expected score under the model's own choice among the datums of the batch; for fixed data.

    ``R = sum_d p_d s_d``, ``p = softmax_d(alpha * mean_t logprob_dt)``, so that
    ``dR/dlogprob_dt = alpha p_d (s_d - R) / T_d``: probability moves from the datums that score worse than
    expected to those that score better, and stops there: R stays between the least and the greatest score.

    Source: Shen et al. 2016, "Minimum Risk Training for Neural Machine Translation" (arXiv:1512.02433),
    equations 6 to 8, with the mean logprob of a datum for the sum, so that length does not decide.

    Args:
        scores_D: ``(D,)``, any unit; R has the same.
        alpha: sharpness of p, per nat. Near 0 all datums are equally likely; high, only the likeliest counts.
    """
    mean_logprobs_D = mean_by_datum(outputs.logprobs_DT, batch)
    chosen_D = torch.where(trained_datums(batch), alpha * mean_logprobs_D, -math.inf).softmax(0)
    return (chosen_D * scores_D).sum()


def score_function(outputs: Outputs, batch: Batch, scores_D: Tensor) -> Tensor:
    """Score-function (REINFORCE) estimate of the expected score; for datums sampled from the model itself.

    ``E = mean_d s_d + mean_d r_d (s_d - b_d)`` with ``r_d = exp(sum_t (logprob_dt - sampling_logprob_dt))``
    the importance weight of the datum and ``b_d`` the mean score of all the other datums. Its gradient,
    ``mean_d r_d (s_d - b_d) sum_t dlogprob_dt``, is unbiased, and plain REINFORCE where ``r_d = 1``.

    Sources: Williams 1992, "Simple statistical gradient-following algorithms"; the leave-one-out baseline
    of Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!".

    Args:
        scores_D: ``(D,)``, any unit; E has the same.

    Raises:
        ObjectiveError: on fixed data, which has no sampling logprobs.
    """
    if outputs.sampling_logprobs_DT is None:
        raise ObjectiveError(fixed_data_refusal())
    trained_D = trained_datums(batch)
    ratios_D = sum_by_datum(outputs.logprobs_DT - outputs.sampling_logprobs_DT, batch).exp()[trained_D]
    scores_D = scores_D[trained_D]
    num_others = max(1, len(scores_D) - 1)
    advantages_D = (scores_D - scores_D.mean()) * len(scores_D) / num_others
    return scores_D.mean() + (ratios_D * advantages_D).mean()


def unlikelihood(outputs: Outputs, batch: Batch, scores_DT: Tensor) -> Tensor:
    """Unlikelihood of flagged tokens, ``-s_dt log(1 - p_dt)``, nats, ``(N,)``; for fixed data.

    Above ``p = 1 - 1e-4`` the curve continues as its tangent, so that a certain token still has a finite
    gradient. Reduced by the term's reduction.

    Source: Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training" (arXiv:1908.04319).

    Args:
        scores_DT: ``(N,)``, at least 0: how much each token is unwanted, 0 or 1 for plain flags.
    """
    logprobs_DT = outputs.logprobs_DT
    uncertain_DT = logprobs_DT.clamp(max=_ALMOST_CERTAIN)
    curve_DT = -torch.log(-torch.expm1(uncertain_DT))
    slope = math.exp(_ALMOST_CERTAIN) / -math.expm1(_ALMOST_CERTAIN)
    tangent_DT = slope * (logprobs_DT - _ALMOST_CERTAIN) - math.log(-math.expm1(_ALMOST_CERTAIN))
    # Either, not a sum of both: the slope of the one, left over in the other, would hide a small p in float32.
    return scores_DT * torch.where(logprobs_DT > _ALMOST_CERTAIN, tangent_DT, curve_DT)


def fixed_data_refusal() -> str:
    """Why the score function has to have samples of the model, and what to use instead."""
    return (
        "its estimator 'score_function' needs samples of the model with their sampling logprobs, and on "
        "fixed data its loss has no lower bound; declare 'minimum_risk' or 'unlikelihood' there"
    )


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "minimum_risk": minimum_risk,
    "score_function": score_function,
    "unlikelihood": unlikelihood,
}

"""KL divergence from a reference, estimated from the logprobs of the targets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.reductions import prefix_sum_by_datum, reduce
from objectives.term import regularizer

KlEstimator = Literal["k1", "k2", "k3"]
Direction = Literal["reverse", "forward", "symmetric"]

# Distance in nats, policy below reference, below which k3 on samples forms the exponent of its product first.
_FAR = -20.0


@regularizer("kl", needs=("ref_logprobs",))
def kl(
    outputs: Outputs, batch: Batch, *, estimator: KlEstimator = "k3", direction: Direction = "reverse"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Estimate of the KL divergence between policy p and reference q at each target, nats, ``(N,)``.

    **Samples.** If the batch has the logprobs of the policy s that sampled it, the value at each target is multiplied
    by the importance ratio of the completion's tokens up to this target, inclusive. With ``d_t = log p_t - log q_t``
    and ``k3(d) = exp(-d) - 1 + d``::

        reverse, KL(p || q):  k3(d_t)  * exp(sum_{u <= t} (log p_u - log s_u))
        forward, KL(q || p):  k3(-d_t) * exp(sum_{u <= t} (log q_u - log s_u))

    symmetric is the mean of both, half of Jeffreys' divergence. k1 has ``d_t`` and ``-d_t`` in place of k3, with the
    same expectations and more variance; k2 is not an estimate of a KL divergence and is rejected. Value and gradient of
    the sum over a completion are unbiased estimates of the divergence between the distributions over completions and
    of its gradient, for any s. The variance grows with the length and the distance of s from p; see
    ``python -m benchmarks kl_gradients``. If a conversation is split into several datums, the ratio of each datum
    covers only that datum's tokens, so the estimates are not exactly those of whole conversations.

    **Fixed data.** Without sampling logprobs there are no importance ratios, as in `kl_unweighted`: the value compares
    p and q on the tokens of the data. With k2 or k3 it is a regularizer that is minimal at ``p = q`` on these tokens
    (k1 has no minimum); it is not a KL divergence.

    Sources: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html) for k1 to k3; Tang & Munos
    2025, "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv:2506.09477) for the gradient of the
    divergence between completions.

    Args:
        estimator: estimator of the divergence; k3 has less variance than k1, and k2 is for fixed data only.
        direction: KL(policy || reference), KL(reference || policy), or the mean of both.

    Metrics:
        k1: mean of d, for every estimator; distance_max: maximum ``|d|`` of a trained token; on samples also
        prefix_ratio_max: maximum importance ratio of a completion up to a trained token.

    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> outputs = Outputs(
    ...     logprobs_DT=torch.tensor([-1.0, -2.0]),
    ...     ref_logprobs_DT=torch.tensor([-1.0, -4.0]),
    ...     sampling_logprobs_DT=torch.tensor([-1.5, -2.0]),
    ... )
    >>> kl(outputs, batch, estimator="k1")[0]
    tensor([0.0000, 3.2974])
    """
    if outputs.sampling_logprobs_DT is None:
        return kl_unweighted(outputs, batch, estimator=estimator, direction=direction)
    if estimator == "k2":
        raise ObjectiveError(
            "estimator 'k2' has no unbiased form on samples; set it to 'k3', or use the term 'kl_unweighted'"
        )
    distance_DT = _distance(outputs, batch)
    directions: tuple[Direction, ...] = ("reverse", "forward") if direction == "symmetric" else (direction,)
    log_ratios = [_log_prefix_ratio(outputs, batch, one_way) for one_way in directions]
    ratios = [log_ratio_DT.exp() for log_ratio_DT in log_ratios]
    values = [
        _weighted_estimate(log_ratio_DT, distance_DT if one_way == "reverse" else -distance_DT, estimator)
        for log_ratio_DT, one_way in zip(log_ratios, directions, strict=True)
    ]
    largest = torch.stack(ratios).detach().amax(0).where(batch.mask_DT, 0.0).max()
    value_DT = sum(values[1:], values[0]) / len(values)
    return value_DT, {**_metrics(distance_DT, batch), "prefix_ratio_max": largest}


@regularizer("kl_unweighted", needs=("ref_logprobs",))
def kl_unweighted(
    outputs: Outputs, batch: Batch, *, estimator: KlEstimator = "k3", direction: Direction = "reverse"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Estimate of the KL divergence at each target without importance weights, nats, ``(N,)``.

    With ``d = log p - log q`` of a target:

    =========  ======================  ======================  ==============
    direction  reverse, KL(p || q)     forward, KL(q || p)     symmetric
    =========  ======================  ======================  ==============
    k1         ``d``                   ``-d``                  (sums to 0)
    k2         ``d^2 / 2``             ``d^2 / 2``             ``d^2 / 2``
    k3         ``exp(-d) - 1 + d``     ``exp(d) - 1 - d``      ``cosh(d) - 1``
    =========  ======================  ======================  ==============

    Values: k1 and k3 are unbiased estimates of the reverse KL on tokens sampled from the policy, and of the forward KL
    on tokens sampled from the reference. symmetric is the mean of both columns and unbiased on neither: the expectation
    of its k3 is half of the chi-square divergence. k3 is never negative.

    Gradients, in expectation, for given preceding tokens: on samples of the policy, k2 has the gradient of the reverse
    KL, reverse k3 has the gradient of the forward KL, and reverse k1 has gradient 0. On samples of the reference,
    forward k1 and forward k3 have the gradient of the forward KL. No gradient accounts for the effect of a token on the
    distribution of later tokens; the term `kl` does. k2, k3 and symmetric are minimal at ``p = q``; k1 has no minimum.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html).

    Args:
        estimator: estimator of the divergence; the three differ in variance and gradient.
        direction: KL(policy || reference), KL(reference || policy), or the mean of both.

    Metrics:
        k1: mean of d, for every estimator; distance_max: maximum ``|d|`` of a trained token.

    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> outputs = Outputs(torch.tensor([-1.0, -2.0]), ref_logprobs_DT=torch.tensor([-1.0, -4.0]))
    >>> kl_unweighted(outputs, batch, estimator="k2")
    (tensor([0., 2.]), {'k1': tensor(1.), 'distance_max': tensor(2.)})
    """
    if estimator == "k1" and direction == "symmetric":
        raise ObjectiveError("estimator 'k1' is 0 for direction 'symmetric'; set estimator to 'k2' or 'k3'")
    distance_DT = _distance(outputs, batch)
    return _estimate(distance_DT, estimator, direction), _metrics(distance_DT, batch)


def _distance(outputs: Outputs, batch: Batch) -> Tensor:
    assert outputs.ref_logprobs_DT is not None, "guaranteed by needs"
    # Prompt tokens are set to 0 because their exponential could overflow.
    return (outputs.logprobs_DT - outputs.ref_logprobs_DT).where(batch.mask_DT, 0.0)


def _log_prefix_ratio(outputs: Outputs, batch: Batch, direction: Direction) -> Tensor:
    """Log of the importance ratio of each completion up to and including each token, ``(N,)``."""
    numerator_DT = outputs.logprobs_DT if direction == "reverse" else outputs.ref_logprobs_DT
    assert numerator_DT is not None, "guaranteed by needs"
    assert outputs.sampling_logprobs_DT is not None, "checked by the caller"
    return prefix_sum_by_datum(numerator_DT - outputs.sampling_logprobs_DT, batch)


def _weighted_estimate(log_ratio_DT: Tensor, distance_DT: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate times importance ratio, with the distance from the distribution of the ratio's numerator."""
    if estimator == "k1":
        return log_ratio_DT.exp() * distance_DT
    near_DT = log_ratio_DT.exp() * _estimate(distance_DT.clamp(min=_FAR), "k3", "reverse")
    # Far from the reference, exp(-d) can overflow where the ratio is almost 0, although their product is finite.
    is_far_DT = distance_DT < _FAR
    log_ratio_DT = torch.where(is_far_DT, log_ratio_DT, 0.0)  # so that an unused overflow has no gradient
    distance_DT = torch.where(is_far_DT, distance_DT, 0.0)
    far_DT = (log_ratio_DT - distance_DT).exp() - log_ratio_DT.exp() * (1 - distance_DT)
    return torch.where(is_far_DT, far_DT, near_DT)


def _metrics(distance_DT: Tensor, batch: Batch) -> dict[str, Tensor]:
    detached_DT = distance_DT.detach()
    return {"k1": reduce(detached_DT, batch, "token_mean"), "distance_max": detached_DT.abs().max()}


def _estimate(distance_DT: Tensor, estimator: KlEstimator, direction: Direction) -> Tensor:
    if estimator == "k2":
        return distance_DT**2 / 2
    if direction == "symmetric":
        return torch.cosh(distance_DT) - 1
    signed_DT = distance_DT if direction == "reverse" else -distance_DT
    return signed_DT if estimator == "k1" else torch.expm1(-signed_DT) + signed_DT

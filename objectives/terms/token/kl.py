"""KL divergence from a reference, estimated per token from the logprobs of the targets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.reductions import reduce
from objectives.term import regularizer

KlEstimator = Literal["k1", "k2", "k3"]
Direction = Literal["reverse", "forward", "symmetric"]


@regularizer("kl", needs=("ref_logprobs",))
def kl(
    outputs: Outputs, batch: Batch, *, estimator: KlEstimator = "k3", direction: Direction = "reverse"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Estimate of the KL divergence between policy p and reference q at each target, nats, ``(N,)``.

    With ``d = log p - log q`` of a target:

    =========  ======================  ======================  ==============
    direction  reverse, KL(p || q)     forward, KL(q || p)     symmetric
    =========  ======================  ======================  ==============
    samples    of the policy           of the reference        of either
    k1         ``d``                   ``-d``                  (sums to 0)
    k2         ``d^2 / 2``             ``d^2 / 2``             ``d^2 / 2``
    k3         ``exp(-d) - 1 + d``     ``exp(d) - 1 - d``      ``cosh(d) - 1``
    =========  ======================  ======================  ==============

    Values: on tokens sampled from the model in the row "samples", k1 and k3 are unbiased estimates of the KL divergence
    in their column. k3 is never negative.

    Gradients, in expectation: on samples of the policy, k2 has the gradient of the reverse KL, reverse k3 has the
    gradient of the forward KL, and reverse k1 has gradient 0. On samples of the reference, forward k1 and forward k3
    have the gradient of the forward KL. k2, k3 and symmetric are minimal at ``p = q``; k1 has no minimum.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); symmetric is half of
    Jeffreys' divergence.

    Metrics:
        k1: mean of d, for every estimator; furthest: maximum ``|d|`` of a trained token.

    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> outputs = Outputs(torch.tensor([-1.0, -2.0]), ref_logprobs_DT=torch.tensor([-1.0, -4.0]))
    >>> kl(outputs, batch, estimator="k2")
    (tensor([0., 2.]), {'k1': tensor(1.), 'furthest': tensor(2.)})
    """
    if estimator == "k1" and direction == "symmetric":
        raise ObjectiveError("estimator 'k1' is 0 for direction 'symmetric'; set estimator to 'k2' or 'k3'")
    assert outputs.ref_logprobs_DT is not None, "guaranteed by needs"
    # Prompt tokens are set to 0 because their exponential could overflow.
    d_DT = (outputs.logprobs_DT - outputs.ref_logprobs_DT).where(batch.mask_DT, 0.0)
    detached_DT = d_DT.detach()
    return _estimate(d_DT, estimator, direction), {
        "k1": reduce(detached_DT, batch, "token_mean"),
        "furthest": detached_DT.abs().max(),
    }


def _estimate(d_DT: Tensor, estimator: KlEstimator, direction: Direction) -> Tensor:
    if estimator == "k2":
        return d_DT**2 / 2
    if direction == "symmetric":
        return torch.cosh(d_DT) - 1
    signed_DT = d_DT if direction == "reverse" else -d_DT
    return signed_DT if estimator == "k1" else torch.expm1(-signed_DT) + signed_DT

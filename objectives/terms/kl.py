"""KL divergence from a reference, estimated token by token from the logprobs of the targets alone."""

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
    """An estimate of the KL divergence between policy p and reference q at each target, nats, ``(N,)``.

    With ``d = log p - log q`` of a target:

    =========  ======================  ======================  ==============
    direction  reverse, KL(p || q)     forward, KL(q || p)     symmetric
    =========  ======================  ======================  ==============
    tokens of  the policy              the reference           either
    k1         ``d``                   ``-d``                  (none: 0)
    k2         ``d^2 / 2``             ``d^2 / 2``             ``d^2 / 2``
    k3         ``exp(-d) - 1 + d``     ``exp(d) - 1 - d``      ``cosh(d) - 1``
    =========  ======================  ======================  ==============

    As values k1 and k3 are unbiased for their direction on tokens of the model named there, and k3 is never negative.
    What trains is the gradient. On tokens of the policy that of k2 is the reverse KL's, that of reverse k3 the
    forward KL's, and that of reverse k1 is 0 on average; on tokens of the reference that of forward k1 and k3 is the
    forward KL's. k2, k3 and cosh pull each target back to its reference; k1 does not stop there.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); symmetric is half of
    Jeffreys' divergence.

    Metrics:
        k1: mean of d, whatever is trained; furthest: greatest ``|d|`` of a trained token.

    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> outputs = Outputs(torch.tensor([-1.0, -2.0]), ref_logprobs_DT=torch.tensor([-1.0, -4.0]))
    >>> kl(outputs, batch, estimator="k2")
    (tensor([0., 2.]), {'k1': tensor(1.), 'furthest': tensor(2.)})
    """
    if estimator == "k1" and direction == "symmetric":
        raise ObjectiveError("k1 of both directions adds up to 0: take the estimator 'k2' or 'k3' for 'symmetric'")
    assert outputs.ref_logprobs_DT is not None, "held by needs"
    # Of prompt tokens the exponential may be beyond all range.
    d_DT = (outputs.logprobs_DT - outputs.ref_logprobs_DT).where(batch.mask_DT, 0.0)
    away_DT = d_DT.detach()
    return _estimate(d_DT, estimator, direction), {
        "k1": reduce(away_DT, batch, "token_mean"),
        "furthest": away_DT.abs().max(),
    }


def _estimate(d_DT: Tensor, estimator: KlEstimator, direction: Direction) -> Tensor:
    if estimator == "k2":
        return d_DT**2 / 2
    if direction == "symmetric":
        return torch.cosh(d_DT) - 1
    toward_DT = d_DT if direction == "reverse" else -d_DT
    return toward_DT if estimator == "k1" else torch.expm1(-toward_DT) + toward_DT

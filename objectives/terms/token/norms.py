"""Norms of the targets' logprobs or probabilities: L1, squared L2 and elastic net."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.term import regularizer

Space = Literal["logprobs", "probabilities"]


@regularizer("l1")
def l1(outputs: Outputs, batch: Batch, *, of: Space = "logprobs") -> Tensor:
    """L1 norm, ``|x|`` of each target token, ``(N,)``; minimizes the mean over trained tokens.

    With ``of="logprobs"``, nats, the term is the unweighted negative log-likelihood and makes targets likelier. With
    ``of="probabilities"`` it makes targets less likely, with gradient p with respect to the logprob.

    Source: Tibshirani 1996, "Regression Shrinkage and Selection via the Lasso", on outputs instead of weights.

    Args:
        of: x, the logprob or the probability of the target.

    >>> import torch
    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> l1(Outputs(torch.tensor([-1.0, -3.0])), batch)
    tensor([1., 3.])
    """
    return _values(outputs, of).abs()


@regularizer("l2")
def l2(outputs: Outputs, batch: Batch, *, of: Space = "logprobs") -> Tensor:
    """Squared L2 norm, ``x^2`` of each target token, ``(N,)``; minimizes the mean over trained tokens.

    With ``of="logprobs"``, nats squared, the least likely targets have the most weight. With ``of="probabilities"`` the
    gradient with respect to the logprob is ``2 p^2``, so mainly confident targets change.

    Source: Hoerl & Kennard 1970, "Ridge Regression", on outputs instead of weights.

    Args:
        of: x, the logprob or the probability of the target.

    >>> import torch
    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> l2(Outputs(torch.tensor([-1.0, -3.0])), batch)
    tensor([1., 9.])
    """
    return _values(outputs, of) ** 2


@regularizer("elastic_net")
def elastic_net(
    outputs: Outputs, batch: Batch, *, of: Space = "logprobs", l1_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
) -> Tensor:
    """Elastic net, ``l1_ratio |x| + (1 - l1_ratio) / 2 x^2`` of each target token, ``(N,)``; minimizes the mean.

    Source: Zou & Hastie 2005, "Regularization and Variable Selection via the Elastic Net", in the form of
    scikit-learn's `ElasticNet`.

    Args:
        of: x, the logprob or the probability of the target.
        l1_ratio: share of the L1 norm; the rest is the squared L2 norm.

    >>> import torch
    >>> batch = Batch(torch.tensor([5, 6]), torch.ones(2), torch.tensor([0, 2]))
    >>> elastic_net(Outputs(torch.tensor([-1.0, -2.0])), batch, l1_ratio=0.5)
    tensor([0.7500, 2.0000])
    """
    values_DT = _values(outputs, of)
    return l1_ratio * values_DT.abs() + (1 - l1_ratio) / 2 * values_DT**2


def _values(outputs: Outputs, of: Space) -> Tensor:
    return outputs.logprobs_DT if of == "logprobs" else outputs.logprobs_DT.exp()

"""From the gradients of all terms to the loss weights of one linear loss.

A service whose loss is ``-sum(weights * logprobs)`` trains any differentiable objective ``C(logprobs)``
exactly to first order when ``weights = -dC/dlogprobs``: the chain rule does the rest. The map is linear, so
the gradients of an objective's terms are computed apart and added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from objectives.balance import Balance
from objectives.diagnostics import GradientStats, all_finite, compare_gradients, scalar_products
from objectives.errors import NotFiniteError
from objectives.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Linearized:
    """One step's objective as a linear loss.

    Attributes:
        loss_weights_DT: ``(N,)``, float32 where the gradients are: what to send as cross_entropy ``weights``.
        metrics: ``loss/...``, ``term/<name>/...`` (the base loss under the name ``base``) and
            ``cosine/<a>/<b>`` for each two terms.
        by_datum: of each term that has it, its value at each datum, ``(D,)``.
    """

    loss_weights_DT: Tensor
    metrics: dict[str, float]
    by_datum: Mapping[str, Tensor] = field(default_factory=dict)


def linearize(
    base: Evaluation,
    terms: Sequence[tuple[Evaluation, float]],
    balance: Balance | None = None,
    step: int = 0,
    base_weight: float = 1.0,
) -> Linearized:
    """Add up a base loss and its weighted terms.

    Args:
        base: the base loss.
        terms: each term with its weight at this step; those that are not due are left out.
        balance: what gives them other weights to be trained with, at this step; the base loss among them.
        base_weight: 1, but for a minibatch of a loss that is a mean.

    Raises:
        NotFiniteError: the sum is beyond the range of its dtype.

    >>> base = Evaluation("base", 2.0, torch.tensor([-1.0, -1.0]))
    >>> term = Evaluation("confidence", 0.5, torch.tensor([0.0, 4.0]))
    >>> linear = linearize(base, [(term, 0.5)])
    >>> linear.loss_weights_DT, linear.metrics["loss/total"]
    (tensor([ 1., -1.]), 2.25)
    """
    rows = [(base, base_weight), *terms]
    gradients_KDT = base.gradient_DT.new_empty((len(rows), *base.gradient_DT.shape), dtype=torch.float64)
    for gradient_DT, (row, _) in zip(gradients_KDT, rows, strict=True):
        gradient_DT.copy_(row.gradient_DT)
    weights_K = torch.tensor([weight for _, weight in rows], dtype=torch.float64)
    products_KK = scalar_products(gradients_KDT)
    balanced: dict[str, float] = {}
    if balance is not None:
        names, values = [row.name for row, _ in rows], [row.value for row, _ in rows]
        weights_K = balance.weights(names, values, weights_K, products_KK, step)
        balanced = {f"term/{name}/weight_balanced": w for name, w in zip(names, weights_K.tolist(), strict=True)}
    # One after the other: the bits of what is trained on are not to depend on how a matrix product was cut up.
    total_DT = gradients_KDT[0] * weights_K[0]
    for gradient_DT, weight in zip(gradients_KDT[1:], weights_K[1:].tolist(), strict=True):
        total_DT.add_(gradient_DT, alpha=weight)
    loss_weights_DT = -total_DT.to(base.gradient_DT.dtype)
    if not all_finite(loss_weights_DT):
        raise NotFiniteError(
            f"The weighted gradients of {', '.join(row.name for row, _ in rows)} add up to more than "
            f"{base.gradient_DT.dtype} holds: lower the weight of the greatest."
        )
    metrics = _metrics(rows, compare_gradients(products_KK, weights_K)) | balanced
    by_datum = {row.name: row.by_datum_D for row, _ in terms if row.by_datum_D is not None}
    return Linearized(loss_weights_DT, metrics, by_datum)


def join_metrics(metrics_of_parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an update from those of its minibatches: losses and contributions add up, the rest are means.

    >>> join_metrics([{"loss/total": 1.0, "term/a/value": 2.0}, {"loss/total": 2.0, "term/a/value": 4.0}])
    {'loss/total': 3.0, 'term/a/value': 3.0}
    """
    figures: dict[str, list[float]] = {}
    for metrics in metrics_of_parts:
        for key, figure in metrics.items():
            figures.setdefault(key, []).append(figure)
    return {
        key: sum(each) if key.startswith("loss/") or key.endswith("/contribution") else sum(each) / len(each)
        for key, each in figures.items()
    }


def _metrics(rows: Sequence[tuple[Evaluation, float]], stats: GradientStats) -> dict[str, float]:
    metrics: dict[str, float] = {}
    norms, weighted_norms = stats.norms_K.tolist(), stats.weighted_norms_K.tolist()
    shares, cosines = stats.shares_K.tolist(), stats.cosines_KK.tolist()
    for k, (row, weight) in enumerate(rows):
        figures = {
            "value": row.value,
            "weight": weight,
            "contribution": weight * row.value,
            "grad_norm": norms[k],
            "grad_norm_weighted": weighted_norms[k],
            "grad_share": shares[k],
            "cosine_to_base": cosines[k][0],
            "duration_s": row.duration_s,
            **row.metrics,
        }
        metrics |= {f"term/{row.name}/{key}": figure for key, figure in figures.items()}
    for (a, (first, _)), (b, (second, _)) in combinations(list(enumerate(rows))[1:], 2):
        metrics[f"cosine/{first.name}/{second.name}"] = cosines[a][b]
    contributions = [weight * row.value for row, weight in rows]
    return {
        "loss/total": sum(contributions),
        "loss/base": contributions[0],
        "loss/regularizers": sum(contributions[1:]),
        **metrics,
    }

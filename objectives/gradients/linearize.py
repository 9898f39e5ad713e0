"""Linearization: the gradients of all terms as the loss weights of one linear loss.

By the chain rule, a service with the loss ``-sum(weights * logprobs)`` computes the exact gradient of any
differentiable objective ``C(logprobs)`` for ``weights = -dC/dlogprobs``. The map is linear, so the gradients of the
terms are computed separately and added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from objectives.errors import NotFiniteError
from objectives.evaluate import Evaluation
from objectives.gradients.balance import Balance, balance_weights
from objectives.gradients.diagnostics import all_finite, compare_gradients, scalar_products
from objectives.term_weights.scale import UNSCALED, Scale


class WeightedTerm(NamedTuple):
    """Evaluated term of a step.

    Attributes:
        evaluation: value and gradient.
        weight: configured weight at the step.
        scale: factor of the batch; see `objectives.term_weights.scale`. The gradient enters the sum with
            ``weight * scale``.
        is_balanced: True if balancing may change the weight; False for a term with a target.
        adds_up: True for a term whose value is a sum, such as one with the reduction `sum`: the values of minibatches
            add up to that of the update.
    """

    evaluation: Evaluation
    weight: float
    scale: float = 1.0
    is_balanced: bool = True
    adds_up: bool = False


@dataclass(frozen=True, slots=True)
class Linearized:
    """Objective of one batch as a linear loss.

    Attributes:
        loss_weights_DT: ``(N,)``, or ``(N, targets per position)``, dtype of the gradients: the ``weights`` of
            cross_entropy.
        total: value of the sum of the base loss and all terms, with their scales and their weights before balancing.
        size: divisor of ``total`` in the metrics; see `objectives.term_weights.scale.Scale.size`.
        rows: the base loss, with its value per unit of ``size`` but its whole gradient, and the terms.
        products_KK: float64 ``(K, K)``, scalar products of the rows' gradients, that of the base loss times
            ``base_unit``.
        factors_K: float64 ``(K,)``: factors of the rows in the sum, after balancing.
        metrics: ``loss/...``, ``term/<name>/...`` (the base loss has the name ``base``) and ``cosine/<a>/<b>`` for each
            pair of terms.
        base_unit: factor from the base loss to its value in ``rows``.
        by_datum: value at each datum, ``(D,)``, for the terms that have one.
    """

    loss_weights_DT: Tensor
    total: float
    size: float
    rows: tuple[WeightedTerm, ...]
    products_KK: Tensor
    factors_K: Tensor
    metrics: dict[str, float]
    base_unit: float
    by_datum: Mapping[str, Tensor] = field(default_factory=dict)


def linearize(
    base: Evaluation,
    terms: Sequence[tuple[Evaluation, float] | WeightedTerm],
    balance: Balance | None = None,
    step: int = 0,
    scale: Scale = UNSCALED,
) -> Linearized:
    """Add up the gradients of a base loss and weighted terms.

    Args:
        base: the base loss.
        terms: the terms due at this step with their weights.
        balance: rule that adapts the weights, including that of the base loss.
        step: step of the run; with a rule's own seed, it determines the random numbers of the rule.
        scale: scale of the batch; by default, weights are plain factors.

    Raises:
        NotFiniteError: the sum overflows its dtype.
        ObjectiveError: the balancing rule does not accept a term's value.

    >>> base = Evaluation("base", 2.0, torch.tensor([-1.0, -1.0]))
    >>> term = Evaluation("confidence", 0.5, torch.tensor([0.0, 4.0]))
    >>> linear = linearize(base, [WeightedTerm(term, 0.25, 2.0)], scale=Scale(1.0, 2.0, 2.0, 1.0))
    >>> linear.loss_weights_DT, linear.metrics["loss/total"], linear.total
    (tensor([ 1., -1.]), 1.125, 2.25)
    """
    rows = [term if isinstance(term, WeightedTerm) else WeightedTerm(*term) for term in terms]
    evaluations = [base, *(term.evaluation for term in rows)]
    gradients_KDT = base.gradient_DT.new_empty((len(evaluations), *base.gradient_DT.shape), dtype=torch.float64)
    for gradient_DT, evaluation in zip(gradients_KDT, evaluations, strict=True):
        gradient_DT.copy_(evaluation.gradient_DT)
    configured = [scale.base, *(term.weight * term.scale for term in rows)]
    factors_K = torch.tensor(configured, dtype=torch.float64)
    products_KK = scalar_products(gradients_KDT)
    # The base loss is shown, and compared with terms, per unit of `size`.
    per_unit = scale.base / scale.size if scale.size else 0.0
    balanced: dict[str, float] = {}
    if balance is not None:
        unbalanced_K = factors_K
        values = [(base.name, base.value * per_unit)]
        values += [(term.evaluation.name, term.evaluation.value) for term in rows]
        left_out = [k for k, term in enumerate(rows, start=1) if not term.is_balanced]
        factors_K = balance_weights(balance, values, factors_K, products_KK, step, left_out)
        ratios = torch.where(unbalanced_K == 0, 1.0, factors_K / unbalanced_K).tolist()
        weights = [1.0, *(term.weight for term in rows)]
        balanced = {
            f"term/{name}/weight_balanced": weight * ratio
            for (name, _), weight, ratio in zip(values, weights, ratios, strict=True)
        }
    # Add one by one: the result of a matrix product could depend in its last bits on how it is blocked.
    total_DT = gradients_KDT[0] * factors_K[0]
    for gradient_DT, factor in zip(gradients_KDT[1:], factors_K[1:].tolist(), strict=True):
        total_DT.add_(gradient_DT, alpha=factor)
    loss_weights_DT = -total_DT.to(base.gradient_DT.dtype)
    if not all_finite(loss_weights_DT):
        raise NotFiniteError(
            f"The sum of the weighted gradients of {', '.join(row.name for row in evaluations)} overflows "
            f"{base.gradient_DT.dtype}; lower the largest weight."
        )
    total = sum(factor * row.value for factor, row in zip(configured, evaluations, strict=True))
    shown = Evaluation(
        base.name, base.value * per_unit, base.gradient_DT, base.metrics, base.duration_s, by_datum_D=base.by_datum_D
    )
    # Express the products and factors of the base row in the same unit; factor times gradient stays the same.
    units_K = torch.tensor([per_unit or 1.0, *(1.0 for _ in rows)], dtype=torch.float64)
    linearized = Linearized(
        loss_weights_DT,
        total,
        scale.size,
        (WeightedTerm(shown, 1.0, scale.size), *rows),
        products_KK * units_K[:, None] * units_K,
        factors_K / units_K,
        {},
        per_unit,
        {row.name: row.by_datum_D for row in evaluations[1:] if row.by_datum_D is not None},
    )
    linearized.metrics.update(join_metrics([linearized]) | balanced)
    return linearized


def join_metrics(parts: Sequence[Linearized]) -> dict[str, float]:
    """Compute the metrics of an update from its minibatches.

    Values are means over the update, or sums for terms with the reduction `sum`. Norms, shares and cosines refer to its
    whole gradient. The gradients of the minibatches belong to different tokens, so their scalar products add up. A
    term's own metrics are weighted as its value is, by the minibatches' tokens or sequences; metrics whose name ends in
    ``_max`` are maxima.

    >>> half = Evaluation("base", 2.0, torch.tensor([-1.0, -1.0]))
    >>> parts = [linearize(half, [], scale=Scale(1.0, 2.0, 2.0, 1.0)) for _ in range(2)]
    >>> metrics = join_metrics(parts)
    >>> metrics["loss/base"], metrics["loss/base_sum"], round(metrics["term/base/grad_norm"], 3)
    (1.0, 4.0, 0.5)
    """
    # If all minibatches are candidates, there is no base loss: the size is 0, and nothing is divided.
    size = sum(part.size for part in parts) or 1.0
    names = list(dict.fromkeys(row.evaluation.name for part in parts for row in part.rows))
    rows_by_name = {name: [row for part in parts for row in part.rows if row.evaluation.name == name] for name in names}
    scales = _scales(row for part in parts for row in part.rows)
    products_KK = torch.zeros((len(names), len(names)), dtype=torch.float64)
    weighted_squares_K = torch.zeros(len(names), dtype=torch.float64)
    for part in parts:
        at = torch.tensor([names.index(row.evaluation.name) for row in part.rows])
        scales_K = torch.tensor([row.scale / (scales[row.evaluation.name] or 1.0) for row in part.rows]).double()
        products_KK[at[:, None], at] += part.products_KK * scales_K[:, None] * scales_K
        weighted_squares_K[at] += part.factors_K**2 * part.products_KK.diagonal()
    # Shares and weighted norms refer to the update per unit of its size, like the values.
    stats = compare_gradients(products_KK, weighted_squares_K.sqrt() / size)
    metrics: dict[str, float] = {}
    contributions: list[float] = []
    columns = zip(
        stats.norms_K.tolist(), stats.weighted_norms_K.tolist(), stats.shares_K.tolist(), stats.cosines_KK[0].tolist(),
        strict=True,
    )  # fmt: skip
    for name, (norm, weighted_norm, share, cosine) in zip(names, columns, strict=True):
        rows = rows_by_name[name]
        values = [row.evaluation.value for row in rows]
        value = sum(values) if rows[0].adds_up else _weighted_mean(values, [row.scale for row in rows])
        contributions.append(rows[0].weight * value * scales[name] / size)
        figures = {
            "value": value,
            "weight": rows[0].weight,
            "contribution": contributions[-1],
            "grad_norm": norm,
            "grad_norm_weighted": weighted_norm,
            "grad_share": share,
            "cosine_to_base": cosine,
            "duration_s": sum(row.evaluation.duration_s for row in rows) / len(rows),
        }
        own_metrics = {key for row in rows for key in row.evaluation.metrics}
        for key in sorted(own_metrics):
            having = [row for row in rows if key in row.evaluation.metrics]
            values = [row.evaluation.metrics[key] for row in having]
            is_max = key.endswith("_max")
            figures[key] = max(values) if is_max else _weighted_mean(values, [row.scale for row in having])
        metrics |= {f"term/{name}/{key}": figure for key, figure in figures.items()}
    for (a, first), (b, second) in combinations(list(enumerate(names))[1:], 2):
        metrics[f"cosine/{first}/{second}"] = stats.cosines_KK[a, b].item()
    return {
        "loss/total": sum(contributions),
        "loss/base": contributions[0],
        **({"loss/base_sum": contributions[0] * size} if abs(size - 1) > 1e-9 else {}),
        "loss/regularizers": sum(contributions[1:]),
        **metrics,
        **_other_metrics(parts, metrics),
    }


def measure_effects(parts: Sequence[Linearized], changes: Sequence[Tensor]) -> dict[str, float]:
    """Compute ``term/<name>/effect``: the change of each term's value that an update caused, to first order.

    The effect is ``<dC/dlogprobs, logprobs after - logprobs before>``. The values are minimized, so a negative effect
    is an improvement. The cosines compare gradients with respect to the logprobs, and so miss that an update of shared
    weights moves all logprobs; the effect includes this.

    Args:
        parts: the linearized minibatches of the update.
        changes: change of the logprobs of each minibatch, ``(N,)``, or ``(N, targets per position)`` for soft targets.

    >>> base = Evaluation("base", 2.0, torch.tensor([-1.0, -1.0]))
    >>> part = linearize(base, [(Evaluation("a", 0.5, torch.tensor([0.0, 4.0])), 1.0)])
    >>> measure_effects([part], [torch.tensor([0.5, 0.25])])
    {'term/base/effect': -0.75, 'term/a/effect': 1.0}
    """
    effects: dict[str, float] = {}
    scales = _scales(row for part in parts for row in part.rows)
    for part, change_DT in zip(parts, changes, strict=True):
        for number, row in enumerate(part.rows):
            name = row.evaluation.name
            unit = part.base_unit if number == 0 else 1.0
            product = float((row.evaluation.gradient_DT.double() * change_DT.double()).sum())
            effects[name] = effects.get(name, 0.0) + row.scale * unit * product
    return {f"term/{name}/effect": effect / (scales[name] or 1.0) for name, effect in effects.items()}


def _scales(rows: Iterable[WeightedTerm]) -> dict[str, float]:
    """Scale of each term's value over the update, by name.

    It is the sum of the scales of the minibatches; for a term whose value adds up, the largest of them.
    """
    scales: dict[str, float] = {}
    for row in rows:
        name, before = row.evaluation.name, scales.get(row.evaluation.name, 0.0)
        scales[name] = max(before, row.scale) if row.adds_up else before + row.scale
    return scales


def _other_metrics(parts: Sequence[Linearized], known: Mapping[str, float]) -> dict[str, float]:
    """Mean over the minibatches of metrics that are not computed from the rows, such as those of skipped terms."""
    keys = sorted({key for part in parts for key in part.metrics if key.startswith("term/")} - known.keys())
    values_by_key = {key: [part.metrics[key] for part in parts if key in part.metrics] for key in keys}
    return {key: sum(values) / len(values) for key, values in values_by_key.items()}


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if total == 0:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total

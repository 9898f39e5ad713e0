"""Choice of the next point of a search, given the points tried before."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from flows.sweeps.config import Range, SearchConfig
from flows.sweeps.space import Dimension, Label
from objectives.config.aliases import renamed_attribute

__getattr__ = partial(renamed_attribute, "flows.sweeps.search")  # names of release 0.1

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, slots=True)
class TriedPoint:
    """Point of a search that has been tried or is running.

    Attributes:
        labels: Label of the value in each dimension, except values without effect, such as the weight of an ablated
            regularizer (`drop_idle_values`).
        mean_metric: Mean of the metric over the trials that have a value; None if no trial has one.
        ended: Whether all trials of the point have ended.
    """

    labels: Mapping[str, Label]
    mean_metric: float | None
    ended: bool


def every_point(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Label]]:
    """Yield every combination of the dimensions' options; the last dimension varies fastest."""
    for options in product(*(dimension.options for dimension in dimensions)):
        yield {dimension.name: option.label for dimension, option in zip(dimensions, options, strict=True)}


def next_point(
    search: SearchConfig, dimensions: Sequence[Dimension], mode: Literal["min", "max"], tried: Sequence[TriedPoint]
) -> dict[str, Label]:
    """Draw the next point of a random or bayesian search.

    The draw depends only on the tried points, so that a resumed sweep continues like an uninterrupted one.
    """
    # Every call creates a new sampler, which would draw the same numbers again without the number of tried points.
    seed = search.seed * 1_000_003 + len(tried)
    sampler = (
        optuna.samplers.RandomSampler(seed=seed)
        if search.method == "random"
        else optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    )
    study = optuna.create_study(sampler=sampler, direction="minimize" if mode == "min" else "maximize")
    study.add_trials([_as_trial(point, dimensions) for point in tried])
    distributions = {dimension.name: _distribution(dimension) for dimension in dimensions}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        params = study.ask(distributions).params
    return {dimension.name: _label(dimension, params[dimension.name]) for dimension in dimensions}


def _distribution(dimension: Dimension) -> BaseDistribution:
    values = dimension.values
    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _label(dimension: Dimension, param: Any) -> Label:
    return param if isinstance(dimension.values, Range) else dimension.values[param].label


def _as_trial(tried: TriedPoint, dimensions: Sequence[Dimension]) -> FrozenTrial:
    active = [dimension for dimension in dimensions if dimension.name in tried.labels]
    has_metric = tried.mean_metric is not None
    state = TrialState.RUNNING if not tried.ended else TrialState.COMPLETE if has_metric else TrialState.FAIL
    return create_trial(
        state=state,
        value=tried.mean_metric if tried.ended else None,
        params={dimension.name: _param(dimension, tried.labels[dimension.name]) for dimension in active},
        distributions={dimension.name: _distribution(dimension) for dimension in active},
    )


def _param(dimension: Dimension, label: Label) -> Label:
    if isinstance(dimension.values, Range):
        return label
    return next(index for index, option in enumerate(dimension.values) if option.label == label)

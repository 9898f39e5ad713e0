"""Search: which point of a space is tried next, as a function of what the points before came to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from flows.sweeps.config import Range, SearchConfig
from flows.sweeps.space import Dimension, Label

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, slots=True)
class Tried:
    """A point and what it came to: its value, or None while it runs or where it came to nothing.

    Attributes:
        values: the label of each dimension's value, without those that changed nothing.
        ended: whether all of its trials have.
    """

    values: Mapping[str, Label]
    value: float | None
    ended: bool


def every_point(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Label]]:
    """Every combination of the dimensions' options, the last dimension the fastest."""
    for options in product(*(each.options for each in dimensions)):
        yield {each.name: option.label for each, option in zip(dimensions, options, strict=True)}


def next_point(
    search: SearchConfig, dimensions: Sequence[Dimension], mode: Literal["min", "max"], tried: Sequence[Tried]
) -> dict[str, Label]:
    """The point that a search draws behind those already there.

    The same points before it make the same draw, so that a sweep that was stopped goes on as it would have.
    """
    # A sampler that starts again with each point would start with the same numbers.
    seed = search.seed * 1_000_003 + len(tried)
    sampler = (
        optuna.samplers.RandomSampler(seed=seed)
        if search.method == "random"
        else optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    )
    study = optuna.create_study(sampler=sampler, direction="minimize" if mode == "min" else "maximize")
    study.add_trials([_as_trial(each, dimensions) for each in tried])
    distributions = {each.name: _distribution(each) for each in dimensions}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        drawn = study.ask(distributions).params
    return {each.name: _label(each, drawn[each.name]) for each in dimensions}


def _distribution(dimension: Dimension) -> BaseDistribution:
    values = dimension.values
    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _label(dimension: Dimension, drawn: Any) -> Label:
    return drawn if isinstance(dimension.values, Range) else dimension.values[drawn].label


def _as_trial(tried: Tried, dimensions: Sequence[Dimension]) -> FrozenTrial:
    there = [each for each in dimensions if each.name in tried.values]
    state = TrialState.RUNNING if not tried.ended else TrialState.FAIL if tried.value is None else TrialState.COMPLETE
    return create_trial(
        state=state,
        value=tried.value if tried.ended else None,
        params={each.name: _drawn(each, tried.values[each.name]) for each in there},
        distributions={each.name: _distribution(each) for each in there},
    )


def _drawn(dimension: Dimension, label: Label) -> Any:
    if isinstance(dimension.values, Range):
        return label
    return next(index for index, option in enumerate(dimension.values) if option.label == label)

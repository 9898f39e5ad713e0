"""Ablations and weight grids: search dimensions generated from the regularizers of an objective."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from blocks.errors import ConfigError
from flows.sweeps.config import Ablation, Range, SweepConfig
from flows.sweeps.space import Dimension, Label, Option
from objectives.config.aliases import renamed_attribute
from objectives.config.spec import ObjectiveSpec
from objectives.objective import Objective
from objectives.term_weights.schedule import Constant, WeightSchedule

__getattr__ = partial(renamed_attribute, "flows.sweeps.ablation")  # names of release 0.1

ABLATION = "ablation"
ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class WeightedRegularizer:
    """Trained regularizer of the base config; `weight` is None if the regularizer has a target instead."""

    name: str
    weight: WeightSchedule | None

    @property
    def path(self) -> str:
        return f"objective.regularizers.{self.name}"


def weighted_regularizers(spec: ObjectiveSpec) -> list[WeightedRegularizer]:
    """Return the enabled regularizers of an objective that have a weight or a target; monitors have none.

    Raises:
        ObjectiveError: The objective is invalid.
    """
    with Objective.from_spec(spec) as objective:
        return [
            WeightedRegularizer(regularizer.name, None if regularizer.target else regularizer.schedule)
            for regularizer in objective.regularizers
            if regularizer.term.kind != "monitor"
        ]


def ablation_dimensions(config: SweepConfig, regularizers: Sequence[WeightedRegularizer]) -> list[Dimension]:
    """Return the dimensions that `ablation` and `weights` add to the space.

    Raises:
        ConfigError: The base config has no enabled regularizer; the name of one cannot be part of a path; or `weights`
            is log-grid and a regularizer has a target or the weight 0.
    """
    if config.ablation == "none" and config.weights == "fixed":
        return []
    if not regularizers:
        raise ConfigError(
            "ablation and weights vary the regularizers of the base config, but it has no enabled one: add a "
            "regularizer, or remove ablation and weights."
        )
    if unclear := [entry.name for entry in regularizers if "." in entry.name or entry.name.isdecimal()]:
        raise ConfigError(
            f"ablation and weights find regularizers by name, but {unclear[0]!r} is a number or has a dot: give the "
            "regularizer another name, and its function as fn."
        )
    weights = (
        [_weight_dimension(config, regularizer) for regularizer in regularizers] if config.weights == "log-grid" else []
    )
    names = [regularizer.name for regularizer in regularizers]
    with_target = {regularizer.name for regularizer in regularizers if regularizer.weight is None}
    subsets_by_label = {} if config.ablation == "none" else subsets(config.ablation, names)
    options = [
        Option(label, _ablated_fields(config, [name for name in names if name not in subset], with_target))
        for label, subset in subsets_by_label.items()
    ]
    # The ablation comes last, so that it overrides the weights of other dimensions.
    return [*weights, *([Dimension(ABLATION, tuple(options))] if options else [])]


def subsets(ablation: Ablation, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the subsets of regularizers to train with, each by its label in the report.

    >>> subsets("leave_one_out", ["a", "b"])
    {'all': ('a', 'b'), 'without a': ('b',), 'without b': ('a',)}
    >>> subsets("one_at_a_time", ["a", "b"])
    {'none': (), 'only a': ('a',), 'only b': ('b',)}
    >>> list(subsets("all_subsets", ["a", "b", "c"]))
    ['none', 'a', 'b', 'c', 'a + b', 'a + c', 'b + c', 'all']
    """
    everything = tuple(names)
    if ablation == "leave_one_out":
        rest = {f"without {name}": tuple(other for other in names if other != name) for name in names}
        return {ALL: everything, **rest}
    if ablation == "one_at_a_time":
        return {NONE: (), **{f"only {name}": (name,) for name in names}}
    sizes = range(1, len(names))
    partial_subsets = {" + ".join(subset): subset for size in sizes for subset in combinations(names, size)}
    return {NONE: (), **partial_subsets, ALL: everything}


def drop_idle_values(values: Mapping[str, Label], dimensions: Sequence[Dimension]) -> dict[str, Label]:
    """Drop the values of a point that have no effect, such as the weight of an ablated regularizer.

    Points that differ only in such values become equal, so that a sweep runs them once.
    """
    ablated = [
        path for dimension in dimensions if dimension.name == ABLATION for path in dimension.fields_of(values[ABLATION])
    ]
    # No field of an ablated regularizer has an effect: objective.regularizers.NAME, .weight, .params.* and so on.
    idle = tuple(path.rpartition(".")[0] + "." for path in ablated)
    paths = {dimension.name: f"{dimension.path}." for dimension in dimensions}
    return {name: value for name, value in values.items() if not paths[name].startswith(idle)}


def _ablated_fields(config: SweepConfig, names: Sequence[str], with_target: Collection[str]) -> dict[str, Any]:
    field, value = ("weight", 0.0) if config.measure_ablated else ("enabled", False)
    fields: dict[str, Any] = {f"objective.regularizers.{name}.{field}": value for name in names}
    if config.measure_ablated:
        fields |= {f"objective.regularizers.{name}.target": None for name in names if name in with_target}
    return fields


def _weight_dimension(config: SweepConfig, regularizer: WeightedRegularizer) -> Dimension:
    path, weight, factors = f"{regularizer.path}.weight", regularizer.weight, sorted(config.weight_factors)
    if weight is None:
        raise ConfigError(
            f"weights=log-grid multiplies weights, but {regularizer.name!r} has a target instead: set weights to "
            f"'fixed', and list values of {regularizer.path}.target in space."
        )
    if isinstance(weight, Constant):
        if weight.value == 0:
            raise ConfigError(
                f"weights=log-grid multiplies the weight of {regularizer.name!r}, which is 0: set a positive weight, "
                "disable the regularizer, or list its weights in space."
            )
        if config.search.method != "grid":
            low, high = factors[0] * weight.value, factors[-1] * weight.value
            if not 0 < low < high:
                raise ConfigError(
                    f"The search {config.search.method} samples the weight of {regularizer.name!r} between {low:g} and "
                    f"{high:g}: set a positive weight and different weight_factors, or use the search grid."
                )
            return Dimension(path, Range(low=low, high=high, log=True), path)
        values = [float(f"{factor * weight.value:.6g}") for factor in factors]
        return Dimension(path, tuple(Option(value, {path: value}) for value in values), path)
    return Dimension(path, tuple(Option(f"x{factor:g}", {path: _scaled(weight, factor)}) for factor in factors), path)


def _scaled(weight: WeightSchedule, factor: float) -> dict[str, Any]:
    """Return the fields of a weight schedule multiplied by a factor."""
    fields = weight.model_dump()
    return fields | {key: fields[key] * factor for key in ("start", "end", "value") if key in fields}

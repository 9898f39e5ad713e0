"""Ablations and grids of weights: the dimensions of a sweep that come of its objective's regularizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from blocks.errors import ConfigError
from flows.sweeps.config import Ablation, Range, SweepConfig
from flows.sweeps.space import Dimension, Label, Option
from objectives.objective import Objective
from objectives.schedule import Constant, WeightSchedule
from objectives.spec import ObjectiveSpec

ABLATION = "ablation"
ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class Weighted:
    """A regularizer that trains: its name and its weight in the base config."""

    name: str
    weight: WeightSchedule

    @property
    def path(self) -> str:
        return f"objective.regularizers.{self.name}"


def weighted_of(spec: ObjectiveSpec) -> list[Weighted]:
    """The enabled regularizers of an objective that have a weight; monitors have none.

    Raises:
        ObjectiveError: the objective is wrong.
    """
    with Objective.from_spec(spec) as objective:
        return [Weighted(each.name, each.schedule) for each in objective.regularizers if each.term.kind != "monitor"]


def ablation_dimensions(config: SweepConfig, regularizers: Sequence[Weighted]) -> list[Dimension]:
    """What `ablation` and `weights` add to the space.

    Raises:
        ConfigError: there is nothing that they could change.
    """
    if config.ablation == "none" and config.weights == "fixed":
        return []
    if not regularizers:
        raise ConfigError(
            "ablation and weights are about the regularizers of the base config, and it has none that is enabled: "
            "give it some, or leave them out."
        )
    weights = [_weight_dimension(config, each) for each in regularizers] if config.weights == "log-grid" else []
    names = [each.name for each in regularizers]
    kept = {} if config.ablation == "none" else subsets(config.ablation, names)
    off = [Option(label, _left_out(config, [n for n in names if n not in trained])) for label, trained in kept.items()]
    # Last, so that what is left out stays so whatever weight another dimension gives it.
    return [*weights, *([Dimension(ABLATION, tuple(off))] if off else [])]


def subsets(ablation: Ablation, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The regularizers that train, by what the report calls them.

    >>> subsets("leave_one_out", ["a", "b"])
    {'all': ('a', 'b'), 'without a': ('b',), 'without b': ('a',)}
    >>> subsets("one_at_a_time", ["a", "b"])
    {'none': (), 'only a': ('a',), 'only b': ('b',)}
    >>> list(subsets("all_subsets", ["a", "b", "c"]))
    ['none', 'a', 'b', 'c', 'a + b', 'a + c', 'b + c', 'all']
    """
    everything = tuple(names)
    if ablation == "leave_one_out":
        rest = {f"without {name}": tuple(each for each in names if each != name) for name in names}
        return {ALL: everything, **rest}
    if ablation == "one_at_a_time":
        return {NONE: (), **{f"only {name}": (name,) for name in names}}
    sizes = range(1, len(names))
    some = {" + ".join(subset): subset for size in sizes for subset in combinations(names, size)}
    return {NONE: (), **some, ALL: everything}


def without_idle(values: Mapping[str, Label], dimensions: Sequence[Dimension]) -> dict[str, Label]:
    """The values of a point but for those that change nothing: of a regularizer that it leaves out.

    Two points that differ in nothing else are one.
    """
    ablated = [path for each in dimensions if each.name == ABLATION for path in each.fields_of(values[ABLATION])]
    idle = tuple(path.rpartition(".")[0] + "." for path in ablated)
    return {name: value for name, value in values.items() if not name.startswith(idle)}


def _left_out(config: SweepConfig, names: Sequence[str]) -> dict[str, Any]:
    field, value = ("weight", 0.0) if config.measure_ablated else ("enabled", False)
    return {f"objective.regularizers.{name}.{field}": value for name in names}


def _weight_dimension(config: SweepConfig, regularizer: Weighted) -> Dimension:
    path, weight, factors = f"{regularizer.path}.weight", regularizer.weight, sorted(config.weight_factors)
    if isinstance(weight, Constant):
        if weight.value == 0:
            raise ConfigError(
                f"weights is log-grid, which multiplies weights, and that of {regularizer.name!r} is 0: give it one, "
                "disable it, or list its weights in space."
            )
        if config.search.method != "grid":
            return Dimension(path, Range(low=factors[0] * weight.value, high=factors[-1] * weight.value, log=True))
        values = [float(f"{factor * weight.value:.6g}") for factor in factors]
        return Dimension(path, tuple(Option(value, {path: value}) for value in values))
    return Dimension(path, tuple(Option(f"x{factor:g}", {path: _times(weight, factor)}) for factor in factors))


def _times(weight: WeightSchedule, factor: float) -> dict[str, Any]:
    """A schedule whose every weight is so many times as great."""
    fields = weight.model_dump()
    return fields | {key: fields[key] * factor for key in ("start", "end", "value") if key in fields}

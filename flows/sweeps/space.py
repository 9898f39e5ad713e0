"""Search space of a sweep: its dimensions, and the config fields that a point sets."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flows.config.loader import name_entries, set_field
from flows.sweeps.config import Range, SweepConfig

Label = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Option:
    """Value of a dimension: its label, and the fields that it sets, by dotted path."""

    label: Label
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dimension:
    """Dimension of the search space: a list of options, or a range of the field `name`.

    Attributes:
        name: dotted path of the field as the config writes it, or a label such as that of an ablation.
        path: the varied field, with the entries of lists by name; empty for several fields.
    """

    name: str
    values: tuple[Option, ...] | Range
    path: str = ""

    @property
    def options(self) -> tuple[Option, ...]:
        """Options of the dimension; for a range, its grid."""
        if isinstance(self.values, tuple):
            return self.values
        return tuple(Option(value, {self.name: value}) for value in _grid(self.values))

    @property
    def extremes(self) -> tuple[Option, ...]:
        """Options to validate: if they are valid, so is the whole dimension. All options, or the ends of a range."""
        if isinstance(self.values, tuple):
            return self.values
        return tuple(Option(value, {self.name: value}) for value in (self.values.low, self.values.high))

    def fields_of(self, label: Label) -> Mapping[str, Any]:
        """Return the fields that the value with this label sets."""
        if isinstance(self.values, Range):
            return {self.name: label}
        return next(option.fields for option in self.values if option.label == label)


def dimensions_of(config: SweepConfig, base: Mapping[str, Any]) -> list[Dimension]:
    """Return the dimensions of the config's `space`, which vary fields of a base config."""
    return [
        Dimension(
            path,
            values if isinstance(values, Range) else tuple(_option(path, value) for value in values),
            name_entries(base, path),
        )
        for path, values in config.space.items()
    ]


def apply(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override fields of a base config, by dotted path; return the new fields.

    Raises:
        ConfigError: A path names an entry that a list lacks, or goes through a plain value.
    """
    fields = copy.deepcopy(dict(base))
    for path, value in overrides.items():
        set_field(fields, path, copy.deepcopy(value))
    return fields


def _option(path: str, value: Any) -> Option:
    """Return the option of a value; a nested value, such as a schedule, is labelled by its JSON."""
    plain = value.item() if hasattr(value, "item") else value
    label = plain if isinstance(plain, Label) else json.dumps(plain)
    return Option(label, {path: plain})


def _grid(values: Range) -> Sequence[int | float]:
    """Return `num` values of a range, including its ends; for integers, fewer if some of them coincide.

    If an end is a float, the values between the ends are rounded to six digits, unless they would lose their order.

    >>> _grid(Range(low=1, high=100, log=True, num=3)), _grid(Range(low=0.0, high=1.0, num=4))
    ([1, 10, 100], [0.0, 0.333333, 0.666667, 1.0])
    >>> _grid(Range(low=1000000.5, high=1000001.0, num=3))
    [1000000.5, 1000000.75, 1000001.0]
    """
    fractions = [i / (values.num - 1) for i in range(values.num)]
    if values.log:
        low, high = math.log(values.low), math.log(values.high)
        grid = [math.exp(low + fraction * (high - low)) for fraction in fractions]
    else:
        grid = [values.low + fraction * (values.high - values.low) for fraction in fractions]
    if isinstance(values.low, int) and isinstance(values.high, int):
        return list(dict.fromkeys(round(value) for value in grid))
    grid[0], grid[-1] = float(values.low), float(values.high)
    rounded = [grid[0], *(float(f"{value:.6g}") for value in grid[1:-1]), grid[-1]]
    return rounded if all(a < b for a, b in pairwise(rounded)) else grid

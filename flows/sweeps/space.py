"""The space of a sweep: its dimensions, and what a place in it makes of the fields of a config."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.config_file import set_field
from flows.sweeps.config import Range, SweepConfig

Label = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Option:
    """One of the values of a dimension: what it is called, and the fields that it sets, by their dotted paths."""

    label: Label
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dimension:
    """What differs between points: one of some options, or a number that is the value of the field `name`."""

    name: str
    values: tuple[Option, ...] | Range

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options; of a range, what a grid takes of it."""
        if isinstance(self.values, tuple):
            return self.values
        return tuple(Option(value, {self.name: value}) for value in _grid(self.values))

    @property
    def extremes(self) -> tuple[Option, ...]:
        """What has to be valid for all of it to be."""
        if isinstance(self.values, tuple):
            return self.values
        return tuple(Option(value, {self.name: value}) for value in (self.values.low, self.values.high))

    def fields_of(self, label: Label) -> Mapping[str, Any]:
        """The fields that a value sets, by its label."""
        if isinstance(self.values, Range):
            return {self.name: label}
        return next(option.fields for option in self.values if option.label == label)


def dimensions_of(config: SweepConfig) -> list[Dimension]:
    """The dimensions that the config's `space` names."""
    return [
        Dimension(path, values if isinstance(values, Range) else tuple(_option(path, value) for value in values))
        for path, values in config.space.items()
    ]


def apply(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a base with others in their place.

    Raises:
        ConfigError: one of them has no place.
    """
    fields = copy.deepcopy(dict(base))
    for path, value in overrides.items():
        set_field(fields, path, copy.deepcopy(value))
    return fields


def _option(path: str, value: Any) -> Option:
    """A value that is no plain one, such as a schedule, is called by its JSON."""
    plain = value.item() if hasattr(value, "item") else value
    label = plain if isinstance(plain, Label) else json.dumps(plain)
    return Option(label, {path: plain})


def _grid(values: Range) -> Sequence[int | float]:
    """So many values of a range, its ends among them.

    >>> _grid(Range(low=1, high=100, log=True, num=3)), _grid(Range(low=0.0, high=1.0, num=3))
    ([1, 10, 100], [0.0, 0.5, 1.0])
    """
    parts = [i / (values.num - 1) for i in range(values.num)]
    if values.log:
        low, high = math.log(values.low), math.log(values.high)
        found = [math.exp(low + part * (high - low)) for part in parts]
    else:
        found = [values.low + part * (values.high - values.low) for part in parts]
    if isinstance(values.low, int) and isinstance(values.high, int):
        return list(dict.fromkeys(round(value) for value in found))
    return [float(f"{value:.6g}") for value in found[:-1]] + [float(values.high)]

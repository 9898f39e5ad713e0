"""What a sweep will run, checked before any of it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from blocks.errors import ConfigError
from flows.blocks_of import service_url
from flows.config_file import read_yaml, validate_fields
from flows.find_flow import find_flow
from flows.sweeps.ablation import ablation_dimensions, weighted_of, without_idle
from flows.sweeps.config import SweepConfig
from flows.sweeps.search import Tried, every_point, next_point
from flows.sweeps.space import Dimension, Label, apply, dimensions_of
from flows.train_config import TrainConfig
from objectives.objective import Objective
from tasks.trials import Point

# What the sweep itself gives each trial, or what they have to have in common.
_NOT_VARIED = {"run_name", "seed", "resume", "storage", "tracking", "experiment", "mlflow_tags", "base_url"}
_OF_THE_ENGINE = {"model", "engine"}
_MOST_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep whose every config is known to be one.

    Attributes:
        config: what was asked for.
        base: the fields of the base with those that are fixed in their place.
        base_config: the same, checked.
        dimensions: of its space.
        grid: the values of every point of a grid, in order; empty for a search that draws.
    """

    config: SweepConfig
    base: Mapping[str, Any]
    base_config: TrainConfig
    dimensions: Sequence[Dimension]
    grid: Sequence[Mapping[str, Label]]

    @property
    def num_points(self) -> int:
        return len(self.grid) or self.config.search.num_points

    def next_point(self, tried: Sequence[Tried]) -> Point | None:
        """The point behind those that were tried, or are; None where there is no more."""
        number = len(tried) + 1
        if number > self.num_points:
            return None
        if self.grid:
            return Point(number, self.grid[number - 1])
        drawn = next_point(self.config.search, self.dimensions, self.config.mode, tried)
        return Point(number, without_idle(drawn, self.dimensions))

    def fields_of(self, values: Mapping[str, Label], run_name: str, seed: int) -> dict[str, Any]:
        """The fields of a run at a place of the space."""
        overrides: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.name in values:
                overrides |= dimension.fields_of(values[dimension.name])
        return apply(self.base, overrides) | {"run_name": run_name, "seed": seed}

    def config_of(self, values: Mapping[str, Label], run_name: str, seed: int) -> TrainConfig:
        """The config of that run.

        Raises:
            ConfigError: there is none there.
        """
        return validate_fields(type(self.base_config), self.fields_of(values, run_name, seed))

    def trial_name(self, point: int, seed: int) -> str:
        """The run name of a trial, with room for any number of points."""
        return f"{self.config.run_name}-{point:03d}-s{seed}"


def make_plan(config: SweepConfig) -> SweepPlan:
    """Lay a sweep out.

    Raises:
        ConfigError, ObjectiveError: a path that leads nowhere, a value that its field does not take, or no such flow.
    """
    found = find_flow(config.flow)
    base = apply(read_yaml(Path(config.base)) if isinstance(config.base, str) else config.base, config.fixed)
    base_config = validate_fields(found.config_type, base | {"run_name": config.run_name})
    _check_paths(config, base_config)
    varies = config.ablation != "none" or config.weights != "fixed"
    dimensions = dimensions_of(config) + ablation_dimensions(
        config, weighted_of(base_config.objective) if varies else []
    )
    plan = SweepPlan(config, base, base_config, dimensions, ())
    _check_values(plan)
    if config.search.method != "grid":
        if not dimensions:
            raise ConfigError(f"The search is {config.search.method}, and nothing differs: give it a space.")
        return plan
    num = prod(len(each.options) for each in dimensions)
    if num > _MOST_POINTS:
        raise ConfigError(
            f"The grid has {num:,} points, and at most {_MOST_POINTS:,} are tried: give it fewer values, or take the "
            "search `random` or `bayesian`."
        )
    # Points that differ only in what an ablation leaves out are one.
    found_points = {
        json.dumps(values): values for values in (without_idle(v, dimensions) for v in every_point(dimensions))
    }
    plan = SweepPlan(config, base, base_config, dimensions, tuple(found_points.values()))
    for number, values in enumerate(plan.grid, start=1):
        _check(plan, values, f"point {number}")
    return plan


def _check_paths(config: SweepConfig, base: TrainConfig) -> None:
    fixed = _NOT_VARIED if service_url(base.base_url) else _NOT_VARIED | _OF_THE_ENGINE
    for path in config.space:
        if (head := path.partition(".")[0]) in fixed:
            what = "give seeds" if head == "seed" else "leave it out of space"
            raise ConfigError(
                f"space holds {path!r}, which the trials of a sweep have in common or are given by it: {what}."
            )


def _check_values(plan: SweepPlan) -> None:
    """Each value by itself: what it leads to, and whether it is one."""
    for dimension in plan.dimensions:
        for option in dimension.extremes:
            _check(plan, {dimension.name: option.label}, "the space")


def _check(plan: SweepPlan, values: Mapping[str, Label], what: str) -> None:
    at = ", ".join(f"{name}={value}" for name, value in values.items()) or "its base"
    try:
        longest = plan.trial_name(plan.num_points, max(plan.config.seeds))
        spec = plan.config_of(values, longest, 0).objective
        with Objective.from_spec(spec):
            pass
    except ValueError as error:  # a ConfigError or an ObjectiveError
        raise ConfigError(f"Nothing was run, because of {what} with {at}: {error}") from error

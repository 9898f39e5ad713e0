"""Plan of a sweep: all points and configs, validated before the first trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, cast

from blocks.errors import ConfigError
from flows.config.flow_lookup import SweptConfig, find_flow
from flows.config.loader import validate_fields
from flows.config.plain_data import read_yaml
from flows.config.rlhf import RlhfConfig
from flows.config.train import TrainConfig
from flows.runs.blocks import service_url
from flows.sweeps.ablation import ablation_dimensions, drop_idle_values, weighted_regularizers
from flows.sweeps.config import SweepConfig
from flows.sweeps.protocols import measured_config
from flows.sweeps.search import TriedPoint, every_point, next_point
from flows.sweeps.space import Dimension, Label, apply, dimensions_of
from objectives.objective import Objective
from tasks.sweeps.store import Point

# Fields that the sweep sets for each trial, or that all trials must share.
_NOT_VARIED = {
    "run_name",
    "seed",
    "resume",
    "if_exists",
    "storage",
    "tracking",
    "experiment",
    "mlflow_tags",
    "base_url",
    "needs_approval",
}
_OF_THE_ENGINE = {"model", "engine"}
_MOST_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Validated sweep.

    Attributes:
        config: Config of the sweep.
        base: Fields of the base config, including the fixed ones.
        base_config: Validated base config.
        dimensions: Dimensions of the search space.
        grid: Values of every point of a grid search, in order; empty for other searches.
    """

    config: SweepConfig
    base: Mapping[str, Any]
    base_config: SweptConfig
    dimensions: Sequence[Dimension]
    grid: Sequence[Mapping[str, Label]]

    @property
    def num_points(self) -> int:
        return len(self.grid) or self.config.search.num_points

    def next_point(self, tried: Sequence[TriedPoint]) -> Point | None:
        """Return the point that follows the tried ones; None after the last point."""
        number = len(tried) + 1
        if number > self.num_points:
            return None
        if self.grid:
            return Point(number, self.grid[number - 1])
        values = next_point(self.config.search, self.dimensions, self.config.mode, tried)
        return Point(number, drop_idle_values(values, self.dimensions))

    def fields_of(self, values: Mapping[str, Label], run_name: str, seed: int) -> dict[str, Any]:
        """Return the config fields of a trial."""
        overrides: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.name in values:
                overrides |= dimension.fields_of(values[dimension.name])
        return apply(self.base, overrides) | {"run_name": run_name, "seed": seed}

    def config_of(self, values: Mapping[str, Label], run_name: str, seed: int) -> SweptConfig:
        """Return the config of a trial.

        Raises:
            ConfigError: The values are invalid.
        """
        return validate_fields(type(self.base_config), self.fields_of(values, run_name, seed))

    def trial_name(self, point: int, seed: int) -> str:
        """Return the run name of a trial; point numbers have at least three digits."""
        return f"{self.config.run_name}-{point:03d}-s{seed}"

    def measured_run(self, trial_name: str) -> str:
        """Return the name of the run that has the metric of a trial: the trial itself, or the last stage of rlhf."""
        return measured_config(self.base_config.model_copy(update={"run_name": trial_name})).run_name


def make_plan(config: SweepConfig) -> SweepPlan:
    """Plan a sweep.

    Raises:
        ConfigError, ObjectiveError: A path, a value or the flow does not exist or is invalid.
    """
    flow = find_flow(config.flow)
    base = apply(read_yaml(Path(config.base)) if isinstance(config.base, str) else config.base, config.fixed)
    base_config = validate_fields(flow.config_type, base | {"run_name": config.run_name})
    if isinstance(base_config, TrainConfig) and base_config.if_exists != "resume":
        raise ConfigError(
            f"base has if_exists {base_config.if_exists!r}, but a resumed sweep resumes its trials: remove if_exists; "
            "to start over, also choose another run_name."
        )
    if isinstance(base_config, TrainConfig) and base_config.resume == "never":
        raise ConfigError("base has resume 'never', but a resumed sweep resumes its trials: remove resume.")
    if base_config.needs_approval:
        raise ConfigError(
            "base has needs_approval, but no person can be asked about each trial: remove needs_approval."
        )
    _check_paths(config, base_config)
    varies = config.ablation != "none" or config.weights != "fixed"
    if varies and isinstance(base_config, RlhfConfig):
        raise ConfigError(
            "ablation and weights vary the objective of one run, but rlhf has a run per stage: remove them, and list "
            "weights in space, as in policy.training.objective.regularizers.NAME.weight."
        )
    dimensions = dimensions_of(config, base) + ablation_dimensions(
        config, weighted_regularizers(measured_config(base_config).objective) if varies else []
    )
    _check_distinct(dimensions)
    plan = SweepPlan(config, base, base_config, dimensions, ())
    _check_values(plan)
    if config.search.method != "grid":
        if not dimensions:
            raise ConfigError(f"The search {config.search.method} has nothing to vary: set space.")
        return plan
    num_points = prod(len(dimension.options) for dimension in dimensions)
    if num_points > _MOST_POINTS:
        raise ConfigError(
            f"The grid has {num_points:,} points, and the limit is {_MOST_POINTS:,}: reduce the values, or use the "
            "search `random` or `bayesian`."
        )
    # Points that differ only in fields of ablated regularizers are equal.
    distinct = {
        json.dumps(values): values for values in (drop_idle_values(v, dimensions) for v in every_point(dimensions))
    }
    plan = SweepPlan(config, base, base_config, dimensions, tuple(distinct.values()))
    for number, values in enumerate(plan.grid, start=1):
        _check(plan, values, f"point {number}")
    return plan


def _check_paths(config: SweepConfig, base: SweptConfig) -> None:
    fixed = _NOT_VARIED if service_url(base.base_url) else _NOT_VARIED | _OF_THE_ENGINE
    for path in config.space:
        if (head := path.partition(".")[0]) in fixed:
            fix = "use seeds" if head == "seed" else "remove it from space"
            raise ConfigError(f"space contains {path!r}, which the sweep sets or all trials share: {fix}.")


def _check_distinct(dimensions: Sequence[Dimension]) -> None:
    """Check that no two dimensions set the same field, because one of them would have no effect."""
    for first, second in combinations([dimension for dimension in dimensions if dimension.path], 2):
        if f"{first.path}.".startswith(f"{second.path}.") or f"{second.path}.".startswith(f"{first.path}."):
            raise ConfigError(
                f"{first.name} and {second.name}, of space or weights, vary the same field: remove one of them."
            )


def _check_values(plan: SweepPlan) -> None:
    """Validate each option, and both ends of each range, by itself."""
    for dimension in plan.dimensions:
        for option in dimension.extremes:
            _check(plan, {dimension.name: option.label}, "the space")


def _check_seeds(config: RlhfConfig, other: RlhfConfig) -> None:
    """Check that the stages of two configs, which differ only in the seed, have different seeds.

    Raises:
        ConfigError: A stage has a seed of its own.
    """
    for stage, same in zip(config.stages(), other.stages(), strict=True):
        if stage.seed == same.seed:
            raise ConfigError(
                f"a stage has the seed {stage.seed}, so the sweep's seeds do not reach it: remove the stage's seed"
            )


def _check(plan: SweepPlan, values: Mapping[str, Label], subject: str) -> None:
    """Validate the config and the objective of a trial with these values.

    Args:
        subject: what has the values, for the error message.

    Raises:
        ConfigError: The values are invalid, or the sweep's seeds do not reach the run.
    """
    assignment = ", ".join(f"{name}={value}" for name, value in values.items()) or "the base config"
    try:
        longest = plan.trial_name(plan.num_points, max(plan.config.seeds))
        config = plan.config_of(values, longest, seed=0)
        if isinstance(config, RlhfConfig):
            _check_seeds(config, cast(RlhfConfig, plan.config_of(values, longest, seed=1)))
        for stage in config.stages() if isinstance(config, RlhfConfig) else [config]:
            with Objective.from_spec(stage.objective):
                pass
    except ValueError as error:  # ConfigError or ObjectiveError
        raise ConfigError(f"No trial was run, because {subject} is invalid at {assignment}: {error}") from error

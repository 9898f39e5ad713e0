"""Config of a sweep: the flow, the fields that all trials share, and the search space."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flows.config.base import Config, NamedConfig

Ablation = Literal["none", "leave_one_out", "one_at_a_time", "all_subsets"]

# YAML 1.1 reads 1e-4 and 1.5e4 as text: a number with an exponent needs a decimal point, and the exponent a sign.
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def _read_number(value: object) -> object:
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


class Range(Config):
    """Range of numbers."""

    low: int | float = Field(
        title="Low", description="Smallest value. If both ends are integers, the range contains only integers."
    )
    high: int | float = Field(title="High", description="Largest value.")
    log: bool = Field(default=False, title="Logarithmic", description="Sample on a logarithmic scale.")
    num: int = Field(
        default=5,
        ge=2,
        title="Number",
        description="Number of values in a grid search; fewer if integers coincide.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low is {self.low}, but must be below high, which is {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low}, but a logarithmic range must be positive")
        return self


Choice = Annotated[Any, BeforeValidator(_read_number)]


class SearchConfig(Config):
    """Search of a sweep's space."""

    method: Literal["grid", "random", "bayesian"] = Field(
        default="grid",
        title="Method",
        description="`grid` tries every combination, `random` samples uniformly, and `bayesian` samples near good "
        "points (TPE of optuna).",
    )
    num_points: int = Field(
        default=20,
        ge=1,
        title="Points",
        description="Number of points for `random` and `bayesian`; raise it later to extend the sweep.",
    )
    seed: int = Field(default=0, ge=0, title="Seed", description="Seed of the search.")


class PruneConfig(Config):
    """Early stopping of trials that are worse than the others at the same step."""

    rule: Literal["median", "successive_halving"] = Field(
        title="Rule",
        description="`median`: stop if the best value so far is worse than the median of the completed trials at that "
        "step. `successive_halving`: at each rung, only the best 1/`factor` of the trials continue.",
    )
    min_steps: int = Field(default=1, ge=1, title="First step", description="First step at which a trial may stop.")
    min_trials: int = Field(
        default=4, ge=1, title="Trials", description="Number of completed trials that `median` needs."
    )
    factor: int = Field(
        default=3,
        ge=2,
        title="Factor",
        description="Factor between the steps of two rungs, for `successive_halving`. The first rung is `min_steps`.",
    )


class SweepConfig(NamedConfig):
    """Runs of one flow over a search space.

    A point is a combination of values; a trial is a run of a point with one seed, named `<run_name>-<point>-s<seed>`.
    """

    flow: str = Field(
        default="sft",
        title="Flow",
        description="Flow to run, by name or by import path, `package.module:name`; its parameter `config` must be a "
        "training config, or that of rlhf.",
        min_length=1,
    )
    base: dict[str, Any] | str = Field(
        title="Base", description="Config fields that all trials share, or the path of a YAML file with them."
    )
    fixed: dict[str, Choice] = Field(
        default_factory=dict,
        title="Fixed",
        description="Values by dotted path that override fields of the base in all trials.",
    )
    space: dict[str, Range | Annotated[tuple[Choice, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        title="Space",
        description="Values or range of each varied field, by dotted path. List entries are addressed by index or "
        "`name`.",
        examples=[{"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "lora_rank": [4, 16]}],
    )
    ablation: Ablation = Field(
        default="none",
        title="Ablation",
        description="Subsets of regularizers to train: all, and all but one (`leave_one_out`); none, and each alone "
        "(`one_at_a_time`); or every subset (`all_subsets`).",
    )
    measure_ablated: bool = Field(
        default=True,
        title="Measure ablated",
        description="Measure ablated regularizers at weight 0; otherwise they are disabled.",
    )
    weights: Literal["fixed", "log-grid"] = Field(
        default="fixed",
        title="Weights",
        description="`log-grid` multiplies each regularizer's weight, or its whole schedule, by each of "
        "`weight_factors`. `random` and `bayesian` sample the factor of a constant weight between the smallest and the "
        "largest of these, and the factor of a schedule from the list.",
    )
    weight_factors: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.1, 1.0, 10.0), min_length=2, title="Factors", description="Factors of `log-grid`."
    )
    search: SearchConfig = Field(default=SearchConfig(), title="Search", description="Search strategy.")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0,), min_length=1, title="Seeds", description="Seeds to run each point with."
    )
    metric: str = Field(
        default="test/nll",
        title="Metric",
        description="Metric whose last value ranks the points; of rlhf, a metric of the policy stage.",
        min_length=1,
    )
    mode: Literal["min", "max"] = Field(
        default="min", title="Mode", description="Whether smaller (`min`) or larger (`max`) values are better."
    )
    prune: PruneConfig | None = Field(
        default=None,
        title="Early stopping",
        description="Stop bad trials early, judged by the metric at the steps that log it. Unset: no early stopping.",
    )
    concurrency: int = Field(
        default=2, ge=1, le=64, title="Concurrency", description="Number of trials that run at the same time."
    )
    retries: int = Field(
        default=1,
        ge=0,
        title="Retries",
        description="Number of retries of a failed trial, from its last checkpoint, if the error may be temporary.",
    )
    deployment: str = Field(
        default="",
        title="Deployment",
        description="`FLOW/NAME` of a deployment whose workers run the trials. Empty: local processes.",
        pattern=r"^([^/]+/[^/]+)?$",
    )
    cluster: Literal["dask", "ray"] | None = Field(
        default=None,
        title="Cluster",
        description="Cluster whose workers run the trials: the one at DASK_SCHEDULER_ADDRESS or RAY_ADDRESS, else one "
        "that the sweep starts. Needs the extra of the same name.",
    )

    @model_validator(mode="after")
    def _check_seeds(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds contains duplicates: list each seed once")
        return self

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.deployment and self.cluster:
            raise ValueError("deployment and cluster are both set: remove one of them")
        return self

"""The config of a sweep: a flow, what all of its trials share, and what differs between them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flows.config import Config, NamedConfig

Ablation = Literal["none", "leave_one_out", "one_at_a_time", "all_subsets"]

# What YAML 1.1 takes for text: an exponent without a point.
_EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")


def _read_number(value: object) -> object:
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


class Range(Config):
    """Every number between two."""

    low: int | float = Field(title="Low", description="The least value; two whole numbers make a range of such.")
    high: int | float = Field(title="High", description="The greatest value.")
    log: bool = Field(default=False, title="Logarithmic", description="Whether equal factors are equally far apart.")
    num: int = Field(default=5, ge=2, title="Number", description="How many values a grid takes of it.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low {self.low} is not above 0, and the range is logarithmic")
        return self


Choice = Annotated[Any, BeforeValidator(_read_number)]


class SearchConfig(Config):
    """Which points of the space are tried."""

    method: Literal["grid", "random", "bayesian"] = Field(
        default="grid",
        title="Method",
        description="`grid` tries every combination, `random` draws them, `bayesian` draws them where points before "
        "were good (optuna's TPE).",
    )
    num_points: int = Field(
        default=20, ge=1, title="Points", description="How many `random` and `bayesian` try; more later go on."
    )
    seed: int = Field(default=0, ge=0, title="Seed", description="Of what they draw.")


class PruneConfig(Config):
    """Trials that are stopped before their end because others were better at the same step."""

    rule: Literal["median", "successive_halving"] = Field(
        title="Rule",
        description="`median`: the best so far is worse than the median that the finished trials had at that step. "
        "`successive_halving`: at each rung of steps only one of `factor` trials goes on.",
    )
    min_steps: int = Field(default=1, ge=1, title="Steps", description="Nothing is stopped before this step.")
    min_trials: int = Field(
        default=4, ge=1, title="Trials", description="Finished trials that `median` wants to compare with."
    )
    factor: int = Field(default=3, ge=2, title="Factor", description="Of `successive_halving`, between two rungs.")


class SweepConfig(NamedConfig):
    """Many runs of one flow, and what comes of them.

    A point is a place of the space; a trial is a run of a point with one seed, `<run_name>-<point>-s<seed>`.
    """

    flow: str = Field(
        default="sft",
        title="Flow",
        description="What a trial runs: a flow of this project by its name, or one by its import path, "
        "`package.module:name`, whose parameter `config` is a config of training.",
        min_length=1,
    )
    base: dict[str, Any] | str = Field(
        title="Base", description="The fields that all trials share, or the path of a YAML file with them."
    )
    fixed: dict[str, Choice] = Field(
        default_factory=dict,
        title="Fixed",
        description="Fields by their dotted path that replace those of the base in all trials.",
    )
    space: dict[str, Range | Annotated[tuple[Choice, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        title="Space",
        description="What differs: a field by its dotted path (an entry of a list by its number or its `name`), and "
        "its values or its range.",
        examples=[{"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "lora_rank": [4, 16]}],
    )
    ablation: Ablation = Field(
        default="none",
        title="Ablation",
        description="Which of the regularizers train: all of them, and all but each one; none, and each one alone; or "
        "every subset.",
    )
    measure_ablated: bool = Field(
        default=True,
        title="Measure what is left out",
        description="A regularizer that an ablation leaves out is measured all the same, at weight 0; else it is "
        "disabled.",
    )
    weights: Literal["fixed", "log-grid"] = Field(
        default="fixed",
        title="Weights",
        description="`log-grid` multiplies each regularizer's weight, whatever its schedule, by each of "
        "`weight_factors`; a search that draws takes a range of them.",
    )
    weight_factors: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.1, 1.0, 10.0), min_length=2, title="Factors", description="Of `log-grid`."
    )
    search: SearchConfig = Field(default=SearchConfig(), title="Search", description="Which points are tried.")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0,), min_length=1, title="Seeds", description="Each point is run once with each."
    )
    metric: str = Field(
        default="test/nll", title="Metric", description="By whose last value points are compared.", min_length=1
    )
    mode: Literal["min", "max"] = Field(
        default="min", title="Mode", description="Whether the best has the smallest or the largest value."
    )
    prune: PruneConfig | None = Field(
        default=None,
        title="Early stopping",
        description="Stop bad trials by the metric, wherever they log it; none are unless this is given.",
    )
    concurrency: int = Field(default=2, ge=1, le=64, title="Concurrency", description="Trials at once.")
    retries: int = Field(
        default=1,
        ge=0,
        title="Retries",
        description="How often a trial that failed is tried again, from its last checkpoint, where that may help.",
    )
    deployment: str = Field(
        default="",
        title="Deployment",
        description="`FLOW/NAME` of a deployment whose workers run the trials. Empty: processes of the sweep's own.",
        pattern=r"^([^/]+/[^/]+)?$",
    )
    cluster: Literal["dask", "ray"] | None = Field(
        default=None,
        title="Cluster",
        description="Workers of which cluster run the trials instead: the one that DASK_SCHEDULER_ADDRESS or "
        "RAY_ADDRESS names, else one that the sweep starts. Each needs its extra installed.",
    )

    @model_validator(mode="after")
    def _check_seeds(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds holds one of them twice")
        return self

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.deployment and self.cluster:
            raise ValueError("deployment and cluster both say who runs the trials: leave one of them out")
        return self

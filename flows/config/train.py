"""Configs of training runs: the part that all methods share, its limits, and the config of sft."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from tinker_cookbook.utils.lr_scheduling import LRSchedule

from flows.config.base import AdamConfig, BuilderConfig, Config, EvaluatorConfig, RunConfig
from objectives.json_schema import optional_group
from objectives.spec import ObjectiveSpec

BASE_MODEL = "base"
Granularity = Literal["task", "step", "segment"]
Policy = Literal["stop", "skip", "rollback"]


class AlertConfig(Config):
    """Limit of a metric, beyond which the run warns and emits the event `tinker-flows.alert`."""

    metric: str = Field(min_length=1, title="Metric", description="Name of a metric, such as `test/nll`.")
    above: float | None = Field(default=None, title="Above", description="The run warns above this value.")
    below: float | None = Field(default=None, title="Below", description="The run warns below this value.")
    patience: int = Field(
        default=1, ge=1, title="Patience", description="Consecutive measurements beyond the limit until the warning."
    )

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError(f"the alert on {self.metric} needs one limit: set either `above` or `below`")
        return self

    @property
    def condition(self) -> str:
        """Condition in words, such as `test/nll above 2`."""
        limit = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"{self.metric} {limit}"

    def is_beyond(self, figure: float) -> bool:
        """Return whether a value is beyond the limit; NaN is beyond every limit."""
        is_within = figure <= self.above if self.above is not None else self.below is None or figure >= self.below
        return not is_within


class GuardConfig(Config):
    """Policies for steps with a bad loss.

    `stop` ends the run, `skip` drops the step's update, and `rollback` restores the last checkpoint and skips the step.
    """

    not_finite: Policy = Field(
        default="stop",
        title="Not finite",
        description="Policy for NaN or infinite losses, gradients and service responses. `skip` needs a forward pass "
        "before each update, even for a plain cross-entropy loss.",
    )
    spike: Literal["off", "stop", "skip", "rollback"] = Field(
        default="off",
        title="Spike",
        description="Policy for a loss far above the losses of recent steps. `skip` costs a forward pass per update.",
    )
    spike_threshold: float = Field(
        default=6.0,
        gt=0,
        title="Spike threshold",
        description="Threshold above the median of recent losses, in robust standard deviations (metric "
        "`guard/spike_score`).",
    )
    spike_window: int = Field(
        default=20,
        ge=4,
        title="Spike window",
        description="Number of recent steps to compare with; the first steps of a run are not checked.",
    )
    untrained: Literal["stop", "skip"] = Field(
        default="stop",
        title="Nothing to train",
        description="Policy for batches with no token or no pair left to train on, for example because `max_length` "
        "is too small. They are found before the first step, except in a dataset that streams.",
    )
    max_in_a_row: int = Field(
        default=3,
        ge=1,
        title="In a row",
        description="Maximum number of consecutive skipped steps; one more stops the run. Steps with nothing to train "
        "do not count.",
    )

    @property
    def needs_forward_pass(self) -> bool:
        """Return whether the loss of a step must be known before its update is sent."""
        return "skip" in (self.not_finite, self.spike)


class BudgetConfig(Config):
    """Limits of a whole run, over all its restarts.

    The run stops at a checkpoint before the step that would exceed a limit, and resumes if the limit is raised.
    """

    hours: float | None = Field(
        default=None, gt=0, title="Hours", description="Wall-clock hours during which the run is open. Unset: no limit."
    )
    usd: float | None = Field(
        default=None,
        gt=0,
        title="US dollars",
        description="Cost of the service's passes and sampled tokens. Unset: no limit.",
    )
    prices: str = Field(
        default="",
        title="Prices",
        description="Path of a price table that overrides the built-in one, in the format of "
        "flows/runs/prices.yaml or of the service's models.json.",
    )


def _or_auto(schema: JsonDict) -> None:
    """Allow the string `auto` in Prefect's form."""
    schema["anyOf"] = [
        {"type": schema.pop("type")},
        {"type": "string", "enum": ["auto"], "title": "Chosen for the model"},
    ]


class AdapterSettings(TypedDict):
    """Rank, seed of the initialization, and trained layers of an adapter."""

    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class ReportConfig(Config):
    """Examples of held-out prompts in the report of a run, from the first and the final weights."""

    num_examples: int = Field(
        default=4,
        ge=0,
        title="Examples",
        description="Held-out prompts whose completions are shown before and after training; 0: none. Supervised runs "
        "sample them, which counts towards the cost; other methods show completions that the evaluation has anyway.",
    )
    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens of a sampled completion.")


class TaskRunnerConfig(Config):
    """Task runner that receives the terms whose `execution` is `task_runner`."""

    kind: Literal["threads", "processes", "dask", "ray"] = Field(
        default="threads",
        title="Kind",
        description="Prefect's task runner: `threads` or `processes` of this machine, or the workers of a `dask` or "
        "`ray` cluster, which need the extra of the same name.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        title="Workers",
        description="Tasks that run at once. Unset: no limit for `threads`, else one per core, at least 2 and at most "
        "8. An existing cluster has its own number.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        title="Address",
        description="Address of an existing `dask` scheduler or `ray` cluster. Unset: the one at "
        "DASK_SCHEDULER_ADDRESS or RAY_ADDRESS, else a cluster on this machine that ends with the run.",
    )

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.address and self.kind not in ("dask", "ray"):
            raise ValueError(f"address={self.address!r} has no effect for kind {self.kind!r}: remove it")
        if self.address and self.workers:
            raise ValueError(f"workers={self.workers} has no effect for the cluster at {self.address}: remove it")
        return self


class TrainConfig(RunConfig):
    """Run that trains an adapter on the batches of a data source."""

    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec(), title="Objective", description="Base loss and its weighted regularizers."
    )
    task_runner: TaskRunnerConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(TaskRunnerConfig),
        title="Task runner",
        description="Prefect task runner of the terms. Unset: the flow's own, by default threads.",
    )
    reference: str = Field(
        default=BASE_MODEL,
        title="Reference",
        description="Frozen model of the terms that need one, such as `kl` and `dpo`: `base`, the model without an "
        "adapter, the `tinker://` path of a checkpoint or of sampler weights, or the name of another base model with "
        "the same tokenizer. The run computes its log-probabilities once per datum, at the price of prompt tokens.",
        min_length=1,
    )
    prompt_logprobs_last_n: Literal["auto", "off"] = Field(
        default="auto",
        title="Score the end of sequences",
        description="Use the SDK's option of this name, with which reference, teachers and `compute_post_kl` score a "
        "sequence only from its first trained token on, so that the service can take the prompt from its prefix "
        "cache. `auto`: use it; warn if the service does not know it. `off`: score whole sequences.",
    )
    lora_rank: int = Field(default=32, ge=1, le=4096, title="LoRA rank", description="Rank of the trained adapter.")
    train_attn: bool = Field(
        default=True, title="Train attention", description="Train an adapter on the attention layers."
    )
    train_mlp: bool = Field(
        default=True, title="Train MLP", description="Train an adapter on the MLP layers, including experts."
    )
    train_unembed: bool = Field(
        default=True, title="Train unembedding", description="Train an adapter on the unembedding layer."
    )
    seed: int = Field(
        default=0,
        ge=0,
        title="Seed",
        description="Seed of the adapter's initialization, of the data order and of random balancing.",
    )
    learning_rate: float = Field(
        default=1e-4,
        gt=0,
        title="Learning rate",
        description="Learning rate at the first step. `auto`: the published LoRA rate by model family and hidden size; "
        "the run records the number.",
        json_schema_extra=_or_auto,
    )
    lr_schedule: LRSchedule = Field(
        default="linear", title="Learning-rate schedule", description="Shape of the decay to the last step."
    )
    adam: AdamConfig = Field(default=AdamConfig(), title="Optimizer", description="Other parameters of AdamW.")
    num_epochs: int = Field(default=1, ge=1, title="Epochs", description="Passes over the data.")
    num_steps: int | None = Field(
        default=None,
        ge=1,
        title="Steps",
        description="Number of steps to train for. Unset: all steps of the epochs.",
    )
    eval_every: int = Field(
        default=10,
        ge=0,
        title="Evaluate every",
        description="Steps between evaluations; the end is evaluated too. 0 disables evaluation.",
    )
    evaluators: tuple[EvaluatorConfig, ...] = Field(
        default=(),
        title="Evaluators",
        description="Evaluators of tinker-cookbook, in addition to the metrics of the held-out data.",
    )
    infrequent_eval_every: int = Field(
        default=100,
        ge=0,
        title="Evaluate infrequently every",
        description="Steps between the evaluations of `infrequent_evaluators`; the end is evaluated too. 0 disables "
        "them.",
    )
    infrequent_evaluators: tuple[EvaluatorConfig, ...] = Field(
        default=(),
        title="Infrequent evaluators",
        description="Evaluators with a period of their own, for measurements that are too slow or too expensive for "
        "every evaluation.",
    )
    report: ReportConfig = Field(default=ReportConfig(), title="Report", description="Examples in the report.")
    granularity: Granularity = Field(
        default="task",
        title="Granularity",
        description="Unit of a Prefect task run: every task of a step (`task`), a whole step (`step`), or the steps "
        "between two checkpoints of `checkpoint_every` (`segment`). Use a coarser unit for runs of more than a few "
        "thousand steps.",
    )
    guards: GuardConfig = Field(
        default=GuardConfig(), title="Guards", description="Policies for steps with a bad loss."
    )
    budget: BudgetConfig = Field(default=BudgetConfig(), title="Budget", description="Time and cost limits.")
    alerts: list[AlertConfig] = Field(
        default=[], title="Alerts", description="Limits of metrics beyond which the run warns and emits an event."
    )

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _find_rate(cls, value: object, info: ValidationInfo) -> object:
        if value != "auto" or "model" not in info.data:
            return value
        from flows.config.learning_rate import recommended_rate

        return recommended_rate(info.data["model"])

    @field_validator("eval_every")
    @classmethod
    def _check_eval_every(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and info.data.get("promote_if"):
            raise ValueError("promote_if needs an evaluation: set eval_every above 0")
        return value

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("train_attn, train_mlp and train_unembed are all false: set one of them to true")
        return self

    @property
    def adapter(self) -> AdapterSettings:
        """Settings of the adapter, as arguments of the service's `create_lora_training_client`."""
        return {
            "rank": self.lora_rank,
            "seed": self.seed,
            "train_attn": self.train_attn,
            "train_mlp": self.train_mlp,
            "train_unembed": self.train_unembed,
        }


class CandidatesConfig(Config):
    """Completions that the model samples for the prompts of supervised data, and that terms score."""

    num: int = Field(default=4, ge=2, title="Number", description="Completions per prompt; they are compared.")
    every: int = Field(
        default=1, ge=1, title="Every", description="Sample at steps divisible by this number; terms skip other steps."
    )
    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens of a completion.")
    overlap: bool = Field(
        default=True,
        title="Overlap",
        description="Sample for the next step while a step is computed, from weights that are one update older; "
        "importance weights account for that. Off: sample from the current weights.",
    )


def _read_off(value: object) -> object:
    """Read YAML's `off`, which is a boolean there, as the word."""
    return "off" if value is False else value


Candidates = Annotated[
    CandidatesConfig | Literal["auto", "off"],
    BeforeValidator(_read_off),
    Field(
        title="Candidates",
        description="Completions that the model samples for the batch's prompts. Scored terms train on them if the "
        "data has one completion per prompt. `auto`: the defaults, if a term needs candidates; `off`: such a term is "
        "an error.",
    ),
]


class SftConfig(TrainConfig):
    """Supervised fine-tuning run."""

    data: BuilderConfig = Field(
        title="Data", description="SupervisedDatasetBuilder of tinker-cookbook and its parameters."
    )
    candidates: Candidates = "auto"

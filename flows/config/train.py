"""Configs of training runs: the part that all methods share, its limits, and the config of sft."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from tinker_cookbook.utils.lr_scheduling import LRSchedule

from flows.config.base import AdamConfig, BuilderConfig, Config, EvaluatorConfig, RunConfig
from objectives.config.json_schema import optional_group
from objectives.config.spec import ObjectiveSpec

BASE_MODEL = "base"
Granularity = Literal["task", "step", "segment"]
Policy = Literal["stop", "skip", "rollback"]


def _read_off(value: object) -> object:
    """Return the word `off` for False, because YAML reads an unquoted `off` as False."""
    return "off" if value is False else value


class AlertConfig(Config):
    """Limit of a metric, beyond which the run warns and emits the event `tinker-flows.alert`."""

    metric: str = Field(min_length=1, title="Metric", description="Name of a metric, such as `test/nll`.")
    above: float | None = Field(default=None, title="Above", description="The run warns above this value.")
    below: float | None = Field(default=None, title="Below", description="The run warns below this value.")
    patience: int = Field(
        default=1,
        ge=1,
        title="Patience",
        description="Number of consecutive measurements beyond the limit that cause a warning.",
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
        # Not whether the value is beyond the limit: a comparison with NaN is false, and NaN has to count as beyond.
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
    spike: Annotated[Literal["off", "stop", "skip", "rollback"], BeforeValidator(_read_off)] = Field(
        default="off",
        title="Spike",
        description="Policy for a loss far above the losses of recent steps. `skip` costs a forward pass per update.",
    )
    spike_threshold: float = Field(
        default=6.0,
        gt=0,
        title="Spike threshold",
        description="Distance above the median of the recent losses beyond which a loss is a spike, in robust standard "
        "deviations (metric `guard/spike_score`).",
    )
    spike_window: int = Field(
        default=20,
        ge=4,
        title="Spike window",
        description="Number of recent losses, one per minibatch, that form the median. The first `spike_window` "
        "losses of a run are not checked.",
    )
    untrained: Literal["stop", "skip"] = Field(
        default="stop",
        title="Nothing to train",
        description="Policy for batches with no token or no pair left to train on, for example because `max_length` "
        "is too small. Such batches are found before the first step. In a streaming dataset and in data that a "
        "teacher completes they cannot be found, and such a batch ends the run.",
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
        default=None,
        gt=0,
        title="Hours",
        description="Maximum number of wall-clock hours for which the run is open, over all restarts. Unset: no limit.",
    )
    usd: float | None = Field(
        default=None,
        gt=0,
        title="US dollars",
        description="Maximum cost of the service's passes and sampled tokens, in US dollars. Unset: no limit.",
    )
    prices: str = Field(
        default="",
        title="Prices",
        description="Path of a price table that overrides the built-in prices, in the format of "
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
        description="Number of held-out prompts whose completions the report shows before and after training; 0: "
        "none. Supervised runs sample these completions, which counts towards the cost; other methods show "
        "completions from their evaluations.",
    )
    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens of a sampled completion.")


class TaskRunnerConfig(Config):
    """Task runner that receives the terms whose `execution` is `task_runner`."""

    kind: Literal["threads", "processes", "dask", "ray"] = Field(
        default="threads",
        title="Kind",
        description="Where the terms run: `threads` or `processes` of this machine, or the workers of a `dask` or "
        "`ray` cluster. A cluster needs the extra of the same name, as in `pip install 'tinker-flows[dask]'`.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        title="Workers",
        description="Number of tasks that run at once. Unset: no limit for `threads`, and otherwise the number of "
        "cores, but at least 2 and at most 8. An existing cluster has its own number.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        title="Address",
        description="Address of an existing `dask` scheduler or `ray` cluster. Unset: the address in "
        "DASK_SCHEDULER_ADDRESS or RAY_ADDRESS; if this is not set either, a new cluster on this machine that ends "
        "with the run.",
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
        default=ObjectiveSpec(), title="Objective", description="Base loss and weighted regularizers."
    )
    task_runner: TaskRunnerConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(TaskRunnerConfig),
        title="Task runner",
        description="Prefect task runner that runs the terms. Unset: the task runner of the flow, by default threads.",
    )
    reference: str = Field(
        default=BASE_MODEL,
        title="Reference",
        description="Frozen model with which terms such as `kl` and `dpo` compare the policy. `base`: the model "
        "without an adapter. A `tinker://` path: a checkpoint or sampler weights. Any other value: the name of "
        "another base model with the same tokenizer. The run computes the reference's log-probabilities once per "
        "datum, at the price of prompt tokens, or of training tokens if positions have several targets.",
        min_length=1,
    )
    prompt_logprobs_last_n: Annotated[Literal["auto", "off"], BeforeValidator(_read_off)] = Field(
        default="auto",
        title="Score the end of sequences",
        description="How the reference, teachers and `compute_post_kl` score a sequence. `auto`: score it only from "
        "the first trained token onwards, with the SDK's option of this name, so that the service can take the prompt "
        "from its prefix cache; if the service does not know the option, the run warns and scores whole sequences. "
        "`off`: score whole sequences.",
    )
    lora_rank: int = Field(default=32, ge=1, le=4096, title="LoRA rank", description="Rank of the trained adapter.")
    train_attn: bool = Field(
        default=True, title="Train attention", description="Train an adapter on the attention layers."
    )
    train_mlp: bool = Field(
        default=True,
        title="Train MLP",
        description="Train an adapter on the MLP layers, including experts (not on the local engine).",
    )
    train_unembed: bool = Field(
        default=True, title="Train unembedding", description="Train an adapter on the unembedding layer."
    )
    seed: int = Field(
        default=0,
        ge=0,
        title="Seed",
        description="Seed for the adapter's initialization, the data order, rollouts, sampled candidates, the report's "
        "examples, and the methods `pcgrad` and `random` of `objective.balance`.",
    )
    learning_rate: float = Field(
        default=1e-4,
        gt=0,
        title="Learning rate",
        description="Learning rate at the first step, or `auto`. `auto` is tinker-cookbook's LoRA rate for the model's "
        "family and hidden size; the run records the number.",
        json_schema_extra=_or_auto,
    )
    lr_schedule: LRSchedule = Field(
        default="linear",
        title="Learning-rate schedule",
        description="Shape of the learning rate's decay over the steps; `constant` does not decay.",
    )
    adam: AdamConfig = Field(
        default=AdamConfig(), title="Optimizer", description="Parameters of AdamW other than the learning rate."
    )
    num_epochs: int = Field(default=1, ge=1, title="Epochs", description="Passes over the data.")
    num_steps: int | None = Field(
        default=None,
        ge=1,
        title="Steps",
        description="Maximum number of steps. Unset: all steps of the epochs.",
    )
    eval_every: int = Field(
        default=10,
        ge=0,
        title="Evaluate every",
        description="Steps between evaluations; the final weights are evaluated, too. 0 disables these evaluations.",
    )
    evaluators: tuple[EvaluatorConfig, ...] = Field(
        default=(),
        title="Evaluators",
        description="Evaluators (as in tinker-cookbook) that run in addition to the metrics of the held-out data.",
    )
    infrequent_eval_every: int = Field(
        default=100,
        ge=0,
        title="Evaluate infrequently every",
        description="Steps between evaluations by `infrequent_evaluators`; the final weights are evaluated, too. 0 "
        "disables these evaluators.",
    )
    infrequent_evaluators: tuple[EvaluatorConfig, ...] = Field(
        default=(),
        title="Infrequent evaluators",
        description="Evaluators that run less often, for measurements that are too slow or too expensive for every "
        "evaluation.",
    )
    report: ReportConfig = Field(default=ReportConfig(), title="Report", description="Examples that the report shows.")
    granularity: Granularity = Field(
        default="task",
        title="Granularity",
        description="Work that one Prefect task run covers. `task`: one operation of a step, such as evaluating a term "
        "or sending an update. `step`: a whole step. `segment`: `checkpoint_every` steps, or all steps if it is 0. "
        "Larger units cost less time and fewer rows in Prefect: use `step` or `segment` for runs of more than a few "
        "thousand steps.",
    )
    guards: GuardConfig = Field(
        default=GuardConfig(), title="Guards", description="Policies for steps with a bad loss."
    )
    budget: BudgetConfig = Field(default=BudgetConfig(), title="Budget", description="Time and cost limits.")
    alerts: list[AlertConfig] = Field(
        default=[], title="Alerts", description="Limits of metrics. Beyond a limit, the run warns and emits an event."
    )

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _find_rate(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str) and value != "auto":
            try:
                float(value)
            except ValueError:
                raise ValueError("use a number or auto") from None
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

    num: int = Field(
        default=4,
        ge=2,
        title="Number",
        description="Completions per prompt, whose scores are compared with each other.",
    )
    every: int = Field(
        default=1,
        ge=1,
        title="Every",
        description="Sample at steps that are divisible by this number. At other steps, the terms that train on "
        "candidates are skipped.",
    )
    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens of a completion.")
    overlap: bool = Field(
        default=True,
        title="Overlap",
        description="Sample for the next step while the current step is computed, from weights that are one update "
        "older. Importance weights correct for the older weights. Off: sample from the current weights.",
    )


Candidates = Annotated[
    CandidatesConfig | Literal["auto", "off"],
    BeforeValidator(_read_off),
    Field(
        title="Candidates",
        description="Completions that the model samples for the batch's prompts. Scored terms train on them if the "
        "data has only one completion per prompt. `auto`: sample with the default settings if a term needs samples. "
        "`off`: do not sample; a term that needs samples is an error.",
    ),
]


class SftConfig(TrainConfig):
    """Supervised fine-tuning run."""

    data: BuilderConfig = Field(
        title="Data", description="`SupervisedDatasetBuilder` of tinker-cookbook and its parameters."
    )
    candidates: Candidates = "auto"

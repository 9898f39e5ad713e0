"""Config of preference optimization."""

from __future__ import annotations

from pydantic import Field

from flows.config.base import BuilderConfig, Config
from flows.config.train import TrainConfig
from objectives.config.json_schema import optional_group
from objectives.config.spec import ObjectiveSpec

# Value of `reference` for the weights that the run starts from.
START = "start"


class VerdictConfig(Config):
    """Verdict appended to a completion, which a reward model learns to predict."""

    question: str = Field(
        default="Is this a good answer? Say Yes or No.",
        min_length=1,
        title="Question",
        description="Question about the completion, appended as a user message.",
    )
    good: str = Field(
        default="Yes", min_length=1, title="Good", description="Verdict that stands for a good completion."
    )


class DpoConfig(TrainConfig):
    """Preference optimization run."""

    comparisons: BuilderConfig = Field(
        title="Comparisons", description="`ComparisonDatasetBuilder` of tinker-cookbook and its parameters."
    )
    renderer_name: str | None = Field(
        default=None,
        title="Renderer",
        description="Chat format of tinker-cookbook. Unset: the format recommended for the model.",
    )
    batch_size: int = Field(default=32, ge=1, title="Batch size", description="Pairs per step.")
    max_length: int | None = Field(
        default=2048,
        ge=2,
        title="Maximum length",
        description="Maximum tokens of a prompt with its completion. Longer sequences are truncated, and pairs whose "
        "completions are then equal or empty are dropped. Unset: no limit.",
    )
    verdict: VerdictConfig | None = Field(
        default=None,
        json_schema_extra=optional_group(VerdictConfig),
        title="Verdict",
        description="Train a reward model: the loss compares the log-probabilities of a verdict after each "
        "completion. Use the base loss `bradley_terry`. Unset: the loss compares the completions themselves.",
    )
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec.model_validate({"base_loss": "dpo"}),
        title="Objective",
        description="Preference loss, such as `dpo`, `ipo`, `kto`, `simpo` or `orpo`, and weighted regularizers.",
    )
    reference: str = Field(
        default=START,
        title="Reference",
        description="Frozen model with which the policy is compared. `start`: the weights at the start of the run, "
        "as named by `resume` or `init_from`, by default the base model. `base`: the base model. A "
        "`tinker://` path: a checkpoint or sampler weights. Any other value: the name of another base model with the "
        "same tokenizer. The run computes the reference's log-probabilities once per completion, at the price of "
        "prompt tokens.",
        min_length=1,
    )

"""Learning from preferences: DPO, IPO, KTO, SimPO or ORPO on pairs of answers of which the better one is known.

python -m flows.dpo --config examples/dpo.yaml learning_rate=1e-5
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Sequence
from dataclasses import replace

from prefect import flow
from pydantic import Field
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from flows.command_line import main
from flows.config import BuilderConfig, Config
from flows.reference import START, open_reference
from flows.result import TrainResult, as_state
from flows.run import open_run
from flows.segments import in_segments
from flows.train import train
from flows.train_config import BASE_MODEL, TrainConfig
from objectives.objective import Objective
from objectives.regularizer import Regularizer
from objectives.spec import ObjectiveSpec
from tasks.comparisons import Rendering, Verdict, build_comparisons
from tasks.evaluate import build_evaluator
from tasks.pairs import HeldOutPairs, Pairs, PairSource
from tasks.renderer import renderer_of
from tasks.sample import open_renderer

# Beside the logprobs of the data under the current weights.
GIVEN = ("ref_logprobs",)


class VerdictConfig(Config):
    """A verdict that is asked for behind an answer."""

    question: str = Field(
        default="Is this a good answer? Say Yes or No.",
        min_length=1,
        title="Question",
        description="What is asked behind the answer.",
    )
    good: str = Field(default="Yes", min_length=1, title="Good", description="The verdict on a good answer.")


class DpoConfig(TrainConfig):
    """A run that learns from preferences."""

    comparisons: BuilderConfig = Field(
        title="Comparisons", description="A tinker-cookbook ComparisonDatasetBuilder and its parameters."
    )
    renderer_name: str | None = Field(
        default=None,
        title="Renderer",
        description="The chat format of tinker-cookbook; unset is the one that the model was made with.",
    )
    batch_size: int = Field(default=32, ge=1, title="Batch size", description="Pairs of one step.")
    max_length: int | None = Field(
        default=2048,
        ge=2,
        title="Longest",
        description="Tokens of a prompt with an answer; the rest is cut off, and a pair left out that then has no two "
        "different answers.",
    )
    verdict: VerdictConfig | None = Field(
        default=None,
        title="Verdict",
        description="Train the log-probability of a verdict behind each answer, with the loss bradley_terry: the run's "
        "model is a reward model then. Unset: that of the answers.",
    )
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec.model_validate({"base_loss": "dpo"}),
        title="Objective",
        description="The base loss, one on preferences such as dpo, ipo, kto, simpo or orpo, and its weighted "
        "regularizers.",
    )
    reference: str = Field(
        default=START,
        title="Reference",
        description="The frozen model that rewards are measured from: `start` is what the run starts from, the "
        "checkpoint that `resume` names or else the base model; `base` is that model in any case, and a `tinker://` "
        "path a checkpoint that training could go on from. It is asked once for each answer.",
        pattern=rf"^({START}|{BASE_MODEL}|tinker://.+)$",
    )


@flow(name="dpo", flow_run_name="{config.run_name}")
def dpo(config: DpoConfig) -> TrainResult:
    """Train a model on preferences between answers, from the start of the run or its last checkpoint."""
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs(GIVEN)
        loss = preference_loss(objective)
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run:
                source, test = open_pairs(config, loss, run.client.get_tokenizer())
                reference = open_reference(run, config) if objective.needs("ref_logprobs") else None
                held_out = [HeldOutPairs(test, loss, reference)] if test else []
                return as_state(train(run, config, source, objective, [*held_out, *evaluators], reference))

        return in_segments(config, attempt)


def preference_loss(objective: Objective) -> Regularizer:
    """The base loss.

    Raises:
        ConfigError: it is none on preferences.
    """
    if objective.base is None:
        raise ConfigError(
            "objective.base_loss is cross_entropy, which would learn the worse answers as well as the better ones: "
            "take dpo, ipo, kto, simpo, orpo or bradley_terry."
        )
    return objective.base


def open_pairs(config: DpoConfig, loss: Regularizer, tokenizer: Tokenizer) -> tuple[PairSource, Pairs | None]:
    """The pairs to train on and, where the data has some, those that are held out.

    Raises:
        ConfigError: there is no such data, it cannot be read, or it is less than a batch.
    """
    data, test = build_comparisons(config.comparisons.builder, config.comparisons.params, tokenizer)
    renderer = open_renderer(config.renderer_name or renderer_of(config.model, tokenizer), tokenizer)
    verdict = Verdict(**config.verdict.model_dump()) if config.verdict else None
    pairs = Pairs(data, Rendering(renderer, config.max_length, verdict), tokenizer, loss.term.name == "kto")
    source = PairSource(pairs, config.batch_size, config.seed, loss.term.name)
    return source, replace(pairs, comparisons=test) if test else None


if __name__ == "__main__":
    main(dpo, DpoConfig)

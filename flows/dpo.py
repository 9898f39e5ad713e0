"""Learning from preferences: DPO, IPO, KTO, SimPO or ORPO on pairs of answers of which the better one is known.

python -m flows.dpo --config examples/dpo.yaml learning_rate=1e-5
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Sequence
from dataclasses import replace

from prefect import flow
from pydantic import Field
from tinker_cookbook.renderers import Renderer
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
        loss = _preference_loss(objective)
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run:
                tokenizer = run.client.get_tokenizer()
                data, test = build_comparisons(config.comparisons.builder, config.comparisons.params, tokenizer)
                verdict = Verdict(**config.verdict.model_dump()) if config.verdict else None
                rendering = Rendering(_renderer(config, tokenizer), config.max_length, verdict)
                pairs = Pairs(data, rendering, tokenizer, unrelated=loss.term.name == "kto")
                source = PairSource(pairs, config.batch_size, config.seed, loss.term.name)
                reference = open_reference(run, config) if objective.needs("ref_logprobs") else None
                held_out = [HeldOutPairs(replace(pairs, comparisons=test), loss, reference)] if test else []
                return as_state(train(run, config, source, objective, [*held_out, *evaluators], reference))

        return in_segments(config, attempt)


def _preference_loss(objective: Objective) -> Regularizer:
    if objective.base is None:
        raise ConfigError(
            "objective.base_loss is cross_entropy, which would learn the worse answers as well as the better ones: "
            "take dpo, ipo, kto, simpo, orpo or bradley_terry."
        )
    return objective.base


def _renderer(config: DpoConfig, tokenizer: Tokenizer) -> Renderer:
    return open_renderer(config.renderer_name or renderer_of(config.model, tokenizer), tokenizer)


if __name__ == "__main__":
    main(dpo, DpoConfig)

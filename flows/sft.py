"""Supervised fine-tuning with a structured objective.

python -m flows.sft --config examples/sft.yaml learning_rate=1e-4
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Sequence

from prefect import flow
from pydantic import Field

from flows.command_line import main
from flows.config import BuilderConfig
from flows.result import TrainResult, as_state
from flows.run import open_run
from flows.segments import in_segments
from flows.train import train
from flows.train_config import TrainConfig
from objectives.objective import Objective
from tasks.data import build_dataset
from tasks.evaluate import HeldOutNLL, build_evaluator

# Beside the logprobs of the data under the current weights.
GIVEN = ("ref_logprobs",)


class SftConfig(TrainConfig):
    """A supervised fine-tuning run."""

    data: BuilderConfig = Field(
        title="Data", description="A tinker-cookbook SupervisedDatasetBuilder and its parameters."
    )


@flow(name="sft", flow_run_name="{config.run_name}")
def sft(config: SftConfig) -> TrainResult:
    """Fine-tune a model on the data of a builder, from the start of the run or its last checkpoint."""
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs(GIVEN)
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run:
                data, tokenizer = config.data, run.client.get_tokenizer()
                source = build_dataset(data.builder, data.params, tokenizer, config.seed, run.for_builders)
                held_out = [HeldOutNLL(source.test, source.tokenizer)] if source.test is not None else []
                return as_state(train(run, config, source, objective, [*held_out, *evaluators]))

        return in_segments(config, attempt)


if __name__ == "__main__":
    main(sft, SftConfig)

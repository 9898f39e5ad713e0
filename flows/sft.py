"""Supervised fine-tuning with a base loss and regularizers.

python -m flows.sft --config examples/sft.yaml learning_rate=1e-3
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.sft:sft", "flows.config.train:SftConfig", __doc__)

# No `from __future__ import annotations` here: Prefect reads the types of the flow's parameters from this file without
# importing it as a module, so it could not resolve annotations that are strings.
from collections.abc import Sequence
from functools import partial

from prefect import flow

from flows.config.train import SftConfig
from flows.runs.result import TrainResult
from flows.runs.retries import run_with_approval
from flows.runs.rights import apply_rights
from flows.runs.run import open_run
from flows.training.candidates import open_candidates
from flows.training.trainer import Trainer
from objectives.batch import TOPK
from objectives.config.aliases import renamed_attribute
from objectives.objective import Objective
from tasks.evaluation.evaluators import HeldOutNLL, build_evaluators
from tasks.supervised.dataset import build_dataset

__getattr__ = partial(renamed_attribute, "flows.sft")  # names that release 0.1 had here

# Inputs that this flow provides to the terms, in addition to the current logprobs.
AVAILABLE_INPUTS = ("ref_logprobs", TOPK)  # TOPK if the data has K targets per position


@flow(name="sft", flow_run_name="{config.run_name}", on_running=[apply_rights])
def sft(config: SftConfig) -> TrainResult:
    """Fine-tune a model on a supervised dataset, or resume the run from its last checkpoint."""
    with Objective.from_spec(config.objective, config.seed) as objective:
        objective.check_needs(AVAILABLE_INPUTS, can_sample=config.candidates != "off")

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, config.adapter) as run:
                evaluators = build_evaluators(config.evaluators, config.infrequent_evaluators, run.builder_arguments)
                data, tokenizer = config.data, run.client.get_tokenizer()
                source = build_dataset(data.builder, data.params, tokenizer, config.seed, run.builder_arguments)
                held_out = [HeldOutNLL(source.test, source.tokenizer)] if source.test is not None else []
                candidates = open_candidates(run, config)
                trainer = Trainer(run, config, source, objective, [*held_out, *evaluators], candidates=candidates)
                return trainer.train()

        return run_with_approval(config, attempt)

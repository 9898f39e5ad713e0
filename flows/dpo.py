"""Preference optimization on pairs of completions: DPO, IPO, KTO, SimPO, ORPO or a Bradley-Terry reward model.

python -m flows.dpo --config examples/dpo.yaml learning_rate=1e-5
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.dpo:dpo", "flows.config.dpo:DpoConfig", __doc__)

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import flow
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from flows.config.dpo import DpoConfig
from flows.runs.result import TrainResult
from flows.runs.retries import run_with_approval
from flows.runs.rights import apply_rights
from flows.runs.run import open_run
from flows.runs.teachers import open_reference
from flows.training.trainer import Trainer
from objectives.config.aliases import renamed_attribute
from objectives.objective import Objective
from objectives.term import Regularizer
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import open_renderer
from tasks.evaluation.evaluators import build_evaluators
from tasks.preference.dataset import Rendering, Verdict, build_comparisons
from tasks.preference.pair_source import HeldOutPairs, PairBatches, PairSource

__getattr__ = partial(renamed_attribute, "flows.dpo")  # names of release 0.1

# Inputs that the base loss and the terms may read, in addition to the current logprobs.
AVAILABLE_INPUTS = ("ref_logprobs",)


@flow(name="dpo", flow_run_name="{config.run_name}", on_running=[apply_rights])
def dpo(config: DpoConfig) -> TrainResult:
    """Train a model on preferences between completions, or resume the run from its last checkpoint."""
    with Objective.from_spec(config.objective, config.seed) as objective:
        objective.check_needs(AVAILABLE_INPUTS)
        loss = preference_loss(objective)

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, config.adapter) as run:
                evaluators = build_evaluators(config.evaluators, config.infrequent_evaluators, run.builder_arguments)
                source, test = open_pairs(config, loss, run.client.get_tokenizer(), run.builder_arguments)
                reference = open_reference(run, config) if objective.needs("ref_logprobs") else None
                held_out = [HeldOutPairs(test, loss, reference)] if test else []
                return Trainer(run, config, source, objective, [*held_out, *evaluators], reference).train()

        return run_with_approval(config, attempt)


def preference_loss(objective: Objective) -> Regularizer:
    """Return the base loss of a preference objective.

    Raises:
        ConfigError: The base loss is cross_entropy, which is no preference loss.
    """
    if objective.base is None:
        raise ConfigError(
            "objective.base_loss is cross_entropy, which would also imitate the rejected completions: use dpo, ipo, "
            "kto, simpo, orpo or bradley_terry."
        )
    return objective.base


def open_pairs(
    config: DpoConfig, loss: Regularizer, tokenizer: Tokenizer, resources: Mapping[str, Any]
) -> tuple[PairSource, PairBatches | None]:
    """Open the training pairs and the held-out pairs; the latter are None if the dataset has none.

    Args:
        resources: open resources of the run, for parameters of the same name that `params` leaves out; see `build`.

    Raises:
        ConfigError: The dataset is missing, unreadable or smaller than a batch.
    """
    data, test = build_comparisons(config.comparisons.builder, config.comparisons.params, tokenizer, resources)
    renderer = open_renderer(config.renderer_name or renderer_name_of(config.model, tokenizer), tokenizer)
    verdict = Verdict(**config.verdict.model_dump()) if config.verdict else None
    rendering = Rendering(renderer, config.max_length, verdict)
    pairs = PairBatches(data, rendering, tokenizer, adds_mismatched=loss.term.name == "kto")
    source = PairSource(pairs, config.batch_size, config.seed, loss.term.name)
    return source, replace(pairs, comparisons=test) if test else None

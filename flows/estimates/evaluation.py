"""Estimate of an evaluation: from an earlier evaluation of the same config, or from the lengths of answers."""

from __future__ import annotations

from collections.abc import Sequence

from flows.estimates.costs import (
    Bill,
    CostEstimate,
    EvaluatorSizes,
    PriceList,
    earlier_runs,
    estimate_session,
    ranges,
)
from flows.evaluate import EvaluateConfig, find_weights, open_held_out
from flows.runs.blocks import service_url
from flows.runs.checkpoints.checkpoint_refs import NamedCheckpoint, with_model
from tasks.evaluation.evaluators import HeldOutNLL, build_evaluators
from tasks.training.reference import scored_tokens


def estimate_evaluation(config: EvaluateConfig) -> CostEstimate:
    """Estimate an evaluation without running it.

    The estimate is the cost of an earlier evaluation if the configs differ only in the checkpoint, the registration,
    the name and other settings that do not change the number of tokens. `steps: all` is never estimated in this way,
    because its number of weights changes.

    Raises:
        ConfigError: The config, the data, a checkpoint or the prices are invalid.
        ServiceError: The service does not respond.
    """
    checkpoint, others, baseline = find_weights(config)
    others_and_baseline = [*others, *([baseline] if baseline else [])]
    config = with_model(config, checkpoint, *others_and_baseline)
    weights = [checkpoint, *others_and_baseline]
    prices = PriceList(config.model, service_url(config.base_url), config.budget.prices)
    runs = (run for run in earlier_runs(config, prices) if not run.is_stopped)
    earlier = None if config.steps == "all" else next(runs, None)
    if earlier:
        return CostEstimate(config.run_name, config.model, len(weights), earlier.costs, earlier.costs, earlier.name)
    with estimate_session(config) as (resources, tokenizer):
        evaluators = EvaluatorSizes.of(build_evaluators(config.evaluators, resources=resources), tokenizer)
        with open_held_out(config, resources["session"], tokenizer) as held_out:
            bills = [Bill(prices), Bill(prices)]
            for bill, is_high in zip(bills, (False, True), strict=True):
                _count_held_out(bill, weights, held_out)
                evaluators.add_to(bill, len(weights), 0, is_high=is_high)
    low, high, parts = ranges(*bills)
    excluded = tuple(evaluators.others)
    return CostEstimate(config.run_name, config.model, len(weights), low, high, parts=parts, excluded=excluded)


def _count_held_out(bill: Bill, weights: Sequence[NamedCheckpoint], held_out: Sequence[HeldOutNLL]) -> None:
    """Count the tokens of the held-out data, which weights without a training client score as prompts."""
    for checkpoint in weights:
        for entry in held_out:
            if "/sampler_weights/" in checkpoint.path:
                scored = scored_tokens(entry.num_tokens, entry.num_datums)
                bill.add("held-out data", bill.prices.model, scored)
            else:
                bill.add_training("held-out data", bill.prices.model, entry.num_tokens)

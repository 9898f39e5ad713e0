"""Evaluation during training: held-out NLL through the training client, and any tinker-cookbook evaluator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tinker
from tinker_cookbook.eval.evaluators import Evaluator, SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.types import SupervisedDataset

from blocks.errors import ConfigError, PoisonedError
from objectives.labels import without_labels
from tasks.data import import_object
from tasks.options import retried_task
from tasks.service_errors import service_errors


class HeldOutNLL(TrainingClientEvaluator):
    """`test/nll`: weighted mean negative log-likelihood of a dataset's trained tokens, in nats per token."""

    def __init__(self, dataset: SupervisedDataset) -> None:
        self._datums = [without_labels(each) for index in range(len(dataset)) for each in dataset.get_batch(index)]
        if not self._datums:
            raise ConfigError(
                "The held-out data has no whole batch: give it more rows, a smaller batch_size, or set eval_every to 0."
            )
        self.num_tokens = sum(datum.model_input.length for datum in self._datums)

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        output = await training_client.forward(self._datums, "cross_entropy")
        logprobs_D = [entry["logprobs"] for entry in output.loss_fn_outputs]
        weights_D = [datum.loss_fn_inputs["weights"] for datum in self._datums]
        nll = compute_mean_nll(logprobs_D, weights_D)
        if not math.isfinite(nll):
            raise PoisonedError(f"The held-out data has the mean negative log-likelihood {nll}: look at its rows.")
        return {"test/nll": nll}


def build_evaluator(builder: str, params: dict[str, object]) -> Evaluator:
    """Call a zero-argument evaluator builder, or an evaluator class with its parameters, by import path.

    Raises:
        ConfigError: no such builder, or it does not build an evaluator.
    """
    make: Callable[..., object] = import_object(builder, "evaluators.builder")
    try:
        evaluator = make(**params)
    except Exception as error:  # somebody else's code, called with the user's parameters
        raise ConfigError(
            f"The evaluator {builder} could not be built ({type(error).__name__}: {error}): check evaluators.params."
        ) from error
    if not isinstance(evaluator, TrainingClientEvaluator | SamplingClientEvaluator):
        raise ConfigError(
            f"The evaluator builder {builder} made a {type(evaluator).__name__} where an evaluator of tinker-cookbook "
            "(TrainingClientEvaluator or SamplingClientEvaluator) is expected."
        )
    return evaluator


@retried_task(name="evaluate", task_run_name="evaluate-{step}")
async def evaluate(client: tinker.TrainingClient, evaluators: Sequence[Evaluator], step: int) -> dict[str, float]:
    """Metrics of the weights that step `step` starts from."""
    metrics: dict[str, float] = {}
    sampler: tinker.SamplingClient | None = None
    for evaluator in evaluators:
        with service_errors(f"run the evaluator {type(evaluator).__name__}"):
            if isinstance(evaluator, TrainingClientEvaluator):
                metrics |= await evaluator(client)
            else:
                sampler = sampler or await client.save_weights_and_get_sampling_client()
                metrics |= await evaluator(sampler)
    return metrics

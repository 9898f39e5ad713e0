"""Evaluation during training: held-out NLL through the training client, and any tinker-cookbook evaluator."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import tinker
import torch
from tinker_cookbook.eval.evaluators import Evaluator, SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError, PoisonedError, TinkerFlowsError
from objectives.labels import without_labels
from tasks.data import import_object
from tasks.options import retried_task
from tasks.service_errors import service_errors
from tasks.tokenized import TokenizedEvaluator


class HeldOutNLL(TrainingClientEvaluator):
    """How likely a dataset's trained tokens are.

    `test/nll` is their weighted mean negative log-likelihood, in nats per token. `test/bits_per_byte` is the same per
    byte of their text, by which models with different tokenizers can be compared: `test/nll` in bits, times the
    trained tokens per byte of UTF-8. Special tokens count as tokens, and not as text.
    """

    def __init__(self, dataset: SupervisedDataset, tokenizer: Tokenizer) -> None:
        self._datums = [without_labels(each) for index in range(len(dataset)) for each in dataset.get_batch(index)]
        if not self._datums:
            raise ConfigError(
                "The held-out data has no whole batch: give it more rows, a smaller batch_size, or set eval_every to 0."
            )
        self.num_tokens = sum(datum.model_input.length for datum in self._datums)
        self._tokens_per_byte = _tokens_per_byte(self._datums, tokenizer)

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        output = await training_client.forward(self._datums, "cross_entropy")
        return self._metrics([entry["logprobs"] for entry in output.loss_fn_outputs])

    async def of_sampler(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        """The same of weights that are there for sampling only."""
        tokens_D = [_whole(datum) for datum in self._datums]
        scored_D = await asyncio.gather(*(sampling_client.compute_logprobs(tokens) for tokens in tokens_D))
        return self._metrics([tinker.TensorData.from_torch(torch.tensor(scored[1:])) for scored in scored_D])

    def _metrics(self, logprobs_D: list[tinker.TensorData]) -> dict[str, float]:
        weights_D = [datum.loss_fn_inputs["weights"] for datum in self._datums]
        nll = compute_mean_nll(logprobs_D, weights_D)
        if not math.isfinite(nll):
            raise PoisonedError(f"The held-out data has the mean negative log-likelihood {nll}: look at its rows.")
        per_byte = self._tokens_per_byte / math.log(2)
        return {"test/nll": nll} | ({"test/bits_per_byte": nll * per_byte} if math.isfinite(per_byte) else {})


def build_evaluator(builder: str, params: dict[str, object]) -> Evaluator:
    """Call an evaluator class, or a builder of evaluators, with its parameters, by import path.

    A builder may itself have to be called for its evaluator, as the classes that tinker-cookbook configures with chz.

    Raises:
        ConfigError: no such builder, or it does not build an evaluator.
    """
    make: Callable[..., object] = import_object(builder, "evaluators.builder")
    try:
        evaluator = make(**params)
        if callable(evaluator) and not isinstance(evaluator, TrainingClientEvaluator | SamplingClientEvaluator):
            evaluator = evaluator()
    except TinkerFlowsError:
        raise
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


async def _sample(
    evaluator: SamplingClientEvaluator,
    sampler: tinker.SamplingClient,
    client: tinker.TrainingClient | tinker.SamplingClient,
) -> dict[str, float]:
    """The metrics of an evaluator, with the tokenizer that a client knows."""
    if isinstance(evaluator, TokenizedEvaluator):
        return await evaluator.measure(sampler, client.get_tokenizer())
    return await evaluator(sampler)


def _whole(datum: tinker.Datum) -> tinker.ModelInput:
    """A datum's input and the target of its last position, which are all tokens that its logprobs are of."""
    last = int(datum.loss_fn_inputs["target_tokens"].data[-1])
    return tinker.ModelInput.from_ints([*datum.model_input.to_ints(), last])


def _tokens_per_byte(datums: Sequence[tinker.Datum], tokenizer: Tokenizer) -> float:
    """Trained tokens per byte of their text; infinite where that has none."""
    num_tokens, num_bytes = 0, 0
    for datum in datums:
        targets, weights = (datum.loss_fn_inputs[key].to_torch() for key in ("target_tokens", "weights"))
        trained = targets[weights != 0].tolist()
        num_tokens += len(trained)
        num_bytes += len(str(tokenizer.decode(trained, skip_special_tokens=True)).encode())
    return num_tokens / num_bytes if num_bytes else math.inf


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
                metrics |= await _sample(evaluator, sampler, client)
    return metrics


@retried_task(name="evaluate", task_run_name="evaluate-sampler")
async def evaluate_sampler(sampler: tinker.SamplingClient, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Metrics of weights that are there for sampling only.

    Raises:
        ConfigError: an evaluator needs a training client.
    """
    metrics: dict[str, float] = {}
    for evaluator in evaluators:
        with service_errors(f"run the evaluator {type(evaluator).__name__}"):
            if isinstance(evaluator, HeldOutNLL):
                metrics |= await evaluator.of_sampler(sampler)
            elif isinstance(evaluator, SamplingClientEvaluator):
                metrics |= await _sample(evaluator, sampler, sampler)
            else:
                raise ConfigError(
                    f"The evaluator {type(evaluator).__name__} needs a training client, and these weights are there "
                    "for sampling only: give the path of a checkpoint that training can go on from."
                )
    return metrics

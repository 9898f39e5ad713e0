"""Batches of preference pairs, and the evaluator of held-out pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker
import torch
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch, Outputs
from objectives.evaluate import evaluate_term
from objectives.labels import find_preference_pairs
from objectives.term import BASE, Regularizer
from tasks.common.task import Pending, retried_task, submit
from tasks.preference.dataset import Comparisons, Rendering
from tasks.training.batch_source import BatchSource, TrainedBatch
from tasks.training.datums import pack_datums
from tasks.training.examples import take_datums, take_values
from tasks.training.forward_backward import enqueue_forward, read_outputs
from tasks.training.held_out import MAX_SCORES, EvaluatedBatch, GradedMetrics, digest_batches
from tasks.training.reference import Reference

# Metrics of a preference loss that are logged under tinker-cookbook's names.
_METRICS = ("accuracy", "margin", "chosen_reward", "rejected_reward")
# Metrics with a score for each pair.
_SCORED = ("accuracy", "margin")
# Losses whose metrics of a batch are the means over its pairs.
_PAIR_LOSSES = frozenset({"dpo", "ipo", "simpo", "orpo", "bradley_terry"})


@dataclass(frozen=True, slots=True)
class PairBatches:
    """Batches of rendered comparisons.

    Attributes:
        adds_mismatched: also add each prompt with the chosen answer of another prompt, as `kto` needs.
    """

    comparisons: Comparisons
    rendering: Rendering
    tokenizer: Tokenizer
    adds_mismatched: bool

    def batch(self, indices: Sequence[int]) -> Batch:
        """Pack both answers of each pair with the labels `pair` and `desirable`.

        Pairs without two distinct answers after truncation are skipped.

        Raises:
            ConfigError: no pair is left.
        """
        preferences = {index: self.comparisons[index] for index in indices}
        datums_P = {index: self.rendering.pair(preferences[index], index) for index in indices}
        pairs = [index for index in indices if datums_P[index]]
        if not pairs:
            limit = self.rendering.max_length
            if limit is None:
                raise ConfigError(
                    f"A batch of {len(indices)} pairs has no pair with two distinct answers: check the rows of the "
                    "data."
                )
            raise ConfigError(
                f"max_length={limit} leaves no pair with two distinct answers in a batch of {len(indices)} pairs: "
                "increase it or check the rows of the data."
            )
        datums = [datum for index in pairs for datum in datums_P[index]]
        if self.adds_mismatched and len(pairs) > 1:
            for index, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
                answer = [*preferences[index].prompt, *preferences[other].chosen]
                datums.append(self.rendering.datum(answer))
        return pack_datums(datums, self.tokenizer)


class PairSource(BatchSource):
    """Source of preference batches: a pure function of data, seed and step."""

    def __init__(self, pairs: PairBatches, batch_size: int, seed: int, loss: str) -> None:
        """Create a source with `batch_size` pairs per step.

        Args:
            loss: name of the preference loss.

        Raises:
            ConfigError: the data has fewer pairs than a batch.
        """
        super().__init__()
        if len(pairs.comparisons) < batch_size:
            raise ConfigError(
                f"The data has {len(pairs.comparisons)} comparisons and batch_size is {batch_size}: add rows or reduce "
                "batch_size."
            )
        self._pairs, self._batch_size, self._seed, self._loss = pairs, batch_size, seed, loss
        self._token_counts: dict[int, int] = {}

    @property
    def steps_per_epoch(self) -> int:
        return len(self._pairs.comparisons) // self._batch_size

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Submit `batch_at` as a task, ahead of the step that trains on the batch."""
        return [submit(load_pairs, self, step)]

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        prefix = f"term/{BASE}/"
        loss_metrics = {key.removeprefix(prefix): value for key, value in terms.items() if key.startswith(prefix)}
        num_pairs = sum(int((minibatch.batch.labels_D["desirable"] == 1).sum()) for minibatch in trained)
        return _metrics(self._loss, loss_metrics["value"], loss_metrics) | {"num_pairs": float(num_pairs)}

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self._pairs.batch(self._indices(step))

    def untrained_steps(self, steps: range) -> Sequence[int]:
        """Return the steps whose batches have no pair with two distinct answers."""
        pairs = self._pairs
        num_tokens: list[int] = []  # 0 without two distinct answers
        for index in range(len(pairs.comparisons)):
            datums = pairs.rendering.pair(pairs.comparisons[index], index)
            num_tokens.append(sum(datum.model_input.length for datum in datums))
        if not pairs.adds_mismatched:  # `kto` adds datums to a batch
            self._token_counts = {step: sum(num_tokens[index] for index in self._indices(step)) for step in steps}
        trained = {index for index, number in enumerate(num_tokens) if number}
        if len(trained) == len(num_tokens):
            return ()
        num_skipped = len(num_tokens) - len(trained)
        self._warnings["untrained_pairs"] = (
            f"{num_skipped} of {len(num_tokens)} training pairs have no two distinct answers and are skipped: raise "
            "max_length, which may have cut them off, or remove the pairs."
        )
        return [step for step in steps if trained.isdisjoint(self._indices(step))]

    def token_counts(self) -> Mapping[int, int]:
        return self._token_counts

    def _indices(self, step: int) -> list[int]:
        """Return the rows of a step; each epoch is shuffled as `datasets` shuffles rows by the same seed."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng(self._seed + epoch).permutation(len(self._pairs.comparisons))
        return order[index * self._batch_size : (index + 1) * self._batch_size].tolist()


class HeldOutPairs(TrainingClientEvaluator):
    """Preference loss of held-out pairs, with metrics such as `test/accuracy` and `test/margin`.

    Accuracy and margin have one score per preference pair, so that evaluations can be compared pair by pair. With more
    than `MAX_SCORES` pairs, a score is the mean over a group of pairs. `kto` has no scores, because it compares each
    completion with the batch.
    """

    def __init__(self, pairs: PairBatches, loss: Regularizer, reference: Reference | None) -> None:
        self.scored_metrics = tuple(f"test/{name}" for name in _SCORED) if loss.term.name in _PAIR_LOSSES else ()
        self._batch, self._loss, self._reference = pairs.batch(range(len(pairs.comparisons))), loss, reference
        self.num_tokens = self._batch.num_tokens
        self.evaluated: Sequence[EvaluatedBatch] = ()

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        pending = enqueue_forward(training_client, self._batch)
        # The first evaluation scores the reference; later ones use the cache. The cost counts for step 0, so the next
        # step that reports its cost includes it.
        scored = asyncio.to_thread(self._reference.logprobs, self._batch, 0) if self._reference else None
        reference_DT = await scored if scored else None
        outputs = replace(read_outputs(await pending, self._batch), ref_logprobs_DT=reference_DT)
        self.evaluated = [EvaluatedBatch(self._batch, outputs.logprobs_DT)]
        evaluation = evaluate_term(self._loss, outputs, self._batch, first_step=False)
        metrics = _metrics(self._loss.term.name, evaluation.value, evaluation.metrics)
        scores, sizes = self._scores(outputs) if self.scored_metrics else ({}, [])
        return GradedMetrics(
            {f"test/{key}": value for key, value in metrics.items()},
            scores,
            digest_batches([self._batch]),
            dict.fromkeys(scores, sizes),
        )

    def _scores(self, outputs: Outputs) -> tuple[dict[str, list[float]], list[int]]:
        """Return the mean of each metric over each group of pairs, and the number of pairs of each group."""
        rows_P = torch.stack(find_preference_pairs(self._batch), dim=1)
        groups = [group for group in torch.tensor_split(rows_P, min(len(rows_P), MAX_SCORES)) if len(group)]
        scores: dict[str, list[float]] = {name: [] for name in self.scored_metrics}
        for group_P in groups:
            rows = group_P.flatten().tolist()
            logprobs_DT, reference_DT = (
                None if values_DT is None else take_values(values_DT, self._batch.offsets_D, rows)
                for values_DT in (outputs.logprobs_DT, outputs.ref_logprobs_DT)
            )
            assert logprobs_DT is not None
            selected = Outputs(logprobs_DT, ref_logprobs_DT=reference_DT)
            evaluation = evaluate_term(self._loss, selected, take_datums(self._batch, rows), first_step=False)
            for name in _SCORED:
                scores[f"test/{name}"].append(evaluation.metrics[name])
        return scores, [len(group_P) for group_P in groups]


@retried_task(name="batch", task_run_name="batch-{step}")
def load_pairs(source: PairSource, step: int) -> Batch:
    """Load the batch of a step."""
    return source.batch_at(step)


def _metrics(loss: str, value: float, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{loss}_loss": value} | {key: metrics[key] for key in _METRICS if key in metrics}

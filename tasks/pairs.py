"""The batches of learning from preferences, and what the weights make of pairs that are held out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch
from objectives.evaluate import evaluate_term
from objectives.regularizer import BASE, Regularizer
from tasks.comparisons import Comparisons, Rendering
from tasks.data import pack_datums
from tasks.forward import enqueue_forward, read_outputs
from tasks.options import Pending, retried_task, submit
from tasks.reference import Reference
from tasks.source import Source, Trained

# Of what a preference loss says of a batch, under tinker-cookbook's names.
_FIGURES = ("accuracy", "margin", "chosen_reward", "rejected_reward")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Comparisons that can be made into batches.

    Attributes:
        unrelated: whether a batch also has answers behind prompts that they do not belong to, as `kto` asks for.
    """

    comparisons: Comparisons
    rendering: Rendering
    tokenizer: Tokenizer
    unrelated: bool

    def batch(self, indices: Sequence[int]) -> Batch:
        """Both answers of each pair, labelled; pairs that `Rendering.pair` leaves out are left out.

        Raises:
            ConfigError: all of them are.
        """
        preferences = {index: self.comparisons[index] for index in indices}
        datums_P = {index: self.rendering.pair(preferences[index], index) for index in indices}
        kept = [index for index in indices if datums_P[index]]
        if not kept:
            raise ConfigError(
                f"In none of the {len(indices)} pairs of a batch max_length ({self.rendering.max_length}) leaves two "
                "answers that differ: raise it, or look at the rows of the data."
            )
        datums = [datum for index in kept for datum in datums_P[index]]
        if self.unrelated and len(kept) > 1:
            for index, other in zip(kept, [*kept[1:], kept[0]], strict=True):
                answer = [*preferences[index].prompt, *preferences[other].chosen]
                datums.append(self.rendering.datum(answer))
        return pack_datums(datums, self.tokenizer)


class PairSource(Source):
    """Comparisons as the batches of a run: a pure function of data, seed and step."""

    def __init__(self, pairs: Pairs, batch_size: int, seed: int, loss: str) -> None:
        """Batches of `batch_size` pairs.

        Args:
            loss: the name of the preference loss.

        Raises:
            ConfigError: there is no whole batch.
        """
        if len(pairs.comparisons) < batch_size:
            raise ConfigError(
                f"The data has {len(pairs.comparisons)} comparisons and a batch takes {batch_size}: give it more rows, "
                "or a smaller batch_size."
            )
        self._pairs, self._batch_size, self._seed, self._loss = pairs, batch_size, seed, loss

    @property
    def steps_per_epoch(self) -> int:
        return len(self._pairs.comparisons) // self._batch_size

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """`batch_at` as a task, run ahead of the step that needs it."""
        return [submit(load_pairs, self, step)]

    def metrics(self, step: int, trained: Sequence[Trained], terms: Mapping[str, float]) -> dict[str, float]:
        prefix = f"term/{BASE}/"
        said = {key.removeprefix(prefix): figure for key, figure in terms.items() if key.startswith(prefix)}
        num_pairs = sum(int((each.batch.labels_D["desirable"] == 1).sum()) for each in trained)
        return _named(self._loss, said["value"], said) | {"num_pairs": float(num_pairs)}

    def batch_at(self, step: int) -> Batch:
        """The batch of a step; an epoch has the order in which `datasets` shuffles its rows by the same seed."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng(self._seed + epoch).permutation(len(self._pairs.comparisons))
        return self._pairs.batch(order[index * self._batch_size : (index + 1) * self._batch_size].tolist())


class HeldOutPairs(TrainingClientEvaluator):
    """What the preference loss says of held-out pairs: its metrics are `test/accuracy`, `test/margin` and so on."""

    def __init__(self, pairs: Pairs, loss: Regularizer, reference: Reference | None) -> None:
        self._batch, self._loss, self._reference = pairs.batch(range(len(pairs.comparisons))), loss, reference
        self.num_tokens = self._batch.num_tokens

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        pending = enqueue_forward(training_client, self._batch)
        reference_DT = await asyncio.to_thread(self._reference.logprobs, self._batch) if self._reference else None
        outputs = replace(read_outputs(await pending, self._batch), ref_logprobs_DT=reference_DT)
        found = evaluate_term(self._loss, outputs, self._batch, first_step=False)
        metrics = _named(self._loss.term.name, found.value, found.metrics)
        return {f"test/{key}": figure for key, figure in metrics.items()}


@retried_task(name="batch", task_run_name="batch-{step}")
def load_pairs(source: PairSource, step: int) -> Batch:
    """`PairSource.batch_at` as a task."""
    return source.batch_at(step)


def _named(loss: str, value: float, said: Mapping[str, float]) -> dict[str, float]:
    return {f"{loss}_loss": value} | {key: said[key] for key in _FIGURES if key in said}

"""Held-out data: values of an objective's terms on each batch, and scores of each problem."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from blocks.storage import RunDirectory
from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError
from objectives.estimators import num_compared
from objectives.evaluate import SKIP_HINT
from objectives.term import Regularizer
from tasks.common.jsonl import read_jsonl
from tasks.common.task import call, opaque_argument
from tasks.training.reference import Reference, load_reference
from tasks.training.terms import TaskTermExecutor

HELD_OUT_NAME = "held_out_terms.jsonl"
_DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class EvaluatedBatch:
    """Held-out batch with its logprobs.

    Attributes:
        batch: the packed datums.
        logprobs_DT: logprobs of the batch's targets under the evaluated weights, in nats.
        scores_D: the method's own scores of each datum, such as its reward; empty without any.
    """

    batch: Batch
    logprobs_DT: Tensor
    scores_D: tuple[Mapping[str, float], ...] = ()


@runtime_checkable
class HeldOutData(Protocol):
    """Evaluator that keeps the batches of its last evaluation, so that terms can be measured on them."""

    @property
    def evaluated(self) -> Sequence[EvaluatedBatch]:
        """Batches of the last evaluation."""
        ...


@dataclass(frozen=True, slots=True)
class BatchValues:
    """Values of a metric on each held-out batch or problem, as stored for paired comparisons.

    Attributes:
        values_B: the values.
        num_datums_B: weight of each value in the metric: number of datums of a batch, of problems of a score, or of
            trained tokens, bytes or loss weights of a row.
        digest: digest of the batches (`digest_batches`) or problems; empty in files that were written without it.
        groups_B: number of the independent sample that each value belongs to, such as its prompt; empty if each value
            is a sample of its own.
    """

    values_B: list[float]
    num_datums_B: Sequence[float]
    digest: str = ""
    groups_B: list[int] = field(default_factory=list)

    def is_paired_with(self, other: BatchValues | None) -> bool:
        """Return whether other values belong to the same batches; without digests, to batches of the same sizes."""
        if other is None or (self.num_datums_B, self.groups_B) != (other.num_datums_B, other.groups_B):
            return False
        return self.digest == other.digest or not (self.digest and other.digest)

    def minus(self, other: BatchValues) -> BatchValues:
        """Differences of paired batches."""
        return replace(self, values_B=[a - b for a, b in zip(self.values_B, other.values_B, strict=True)])

    @property
    def is_constant(self) -> bool:
        """Return whether all values that have a weight are equal."""
        return len({value for value, size in zip(self.values_B, self.num_datums_B, strict=True) if size}) < 2

    @property
    def num_samples(self) -> int:
        """Number of independent samples."""
        return len(self._totals()[0])

    @property
    def weighted_S(self) -> list[float]:
        """Share of each independent sample in the weighted mean, scaled so that the plain mean is the weighted mean.

        Differences of equal policies on the same data have random signs, as a test that flips signs assumes.

        >>> BatchValues([1.0, 4.0], [1, 3]).weighted_S
        [0.5, 6.0]
        """
        sums_S, sizes_S = self._totals()
        return (sums_S * (len(sums_S) / sizes_S.sum())).tolist()

    def mean(self) -> tuple[float, float]:
        """Weighted mean and its standard error by the jackknife over independent samples; NaN for a single sample.

        The jackknife allows for samples of uneven sizes. For equal sizes, it is the usual standard error.

        Source: Efron and Stein 1981, "The Jackknife Estimate of Variance", Annals of Statistics 9(3).

        >>> BatchValues([1.0, 3.0], [4, 4]).mean()
        (2.0, 1.0)
        """
        sums_S, sizes_S = self._totals()
        total, num = float(sizes_S.sum()), len(sums_S)
        mean = float(sums_S.sum()) / total
        if num < 2:
            return mean, math.nan
        if self.is_constant:
            first = next(index for index, size in enumerate(self.num_datums_B) if size)
            return self.values_B[first], 0.0  # without the rounding of the weights
        changes_S = (sums_S - mean * sizes_S) / (total - sizes_S)  # of the mean if a sample is left out
        return mean, math.sqrt((num - 1) / num * float(changes_S @ changes_S))

    def _totals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sum and weight of each independent sample that has a weight."""
        sizes_B = np.asarray(self.num_datums_B, dtype=np.float64)
        groups_B = np.asarray(self.groups_B or range(len(sizes_B)), dtype=np.int64)
        weighted_B = sizes_B * np.asarray(self.values_B, dtype=np.float64)
        sums_S, sizes_S = (np.bincount(groups_B, parts_B).astype(np.float64) for parts_B in (weighted_B, sizes_B))
        return sums_S[sizes_S > 0], sizes_S[sizes_S > 0]


# Maximum number of scores of held-out data. More scores slow a comparison down and barely narrow its interval.
MAX_SCORES = 200


class GradedMetrics(dict[str, float]):
    """Metrics of graded answers or held-out data, and the scores of each problem that they average.

    Attributes:
        scores: score of each problem, such as an accuracy from 0 to 1, by metric.
        problems: digest of the problems, which tells whether two evaluations can be compared; empty if it is unknown.
        sizes: weight of each score by metric, such as the number of problems that it is the mean over; metrics without
            an entry average one problem per score.
        groups: number of the independent sample that each score belongs to; empty if each is a sample of its own.
    """

    def __init__(
        self,
        metrics: Mapping[str, float],
        scores: Mapping[str, list[float]],
        problems: str = "",
        sizes: Mapping[str, Sequence[float]] = MappingProxyType({}),
        groups: Sequence[int] = (),
    ) -> None:
        super().__init__(metrics)
        self.scores, self.problems, self.sizes, self.groups = scores, problems, dict(sizes), groups


@dataclass(frozen=True, slots=True)
class HeldOutTerms:
    """Measured values of terms on held-out data.

    Attributes:
        metrics: `test/term/<name>/value`, the mean over the batches weighted by their number of datums; and, for
            several batches, `test/term/<name>/stderr`, the standard error of that mean.
        by_batch: values of each batch, by the name of the term.
        failed: reason why a term has no value, by the name of the term.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    by_batch: dict[str, BatchValues] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: HeldOutTerms) -> HeldOutTerms:
        """Return the values of both."""
        return HeldOutTerms(self.metrics | other.metrics, self.by_batch | other.by_batch, self.failed | other.failed)


def measure_held_out(
    regularizers: Sequence[Regularizer],
    evaluated: Sequence[EvaluatedBatch],
    executor: TaskTermExecutor,
    reference: Reference | None,
    step: int,
) -> HeldOutTerms:
    """Measure the terms on held-out batches, concurrently.

    A term that fails here, for example because the held-out data lacks its labels, is listed in `failed` and never ends
    the run, whatever its `on_error`.

    Args:
        reference: reference of the run, for terms that compare with it.
        step: step before which the weights are evaluated.
    """
    if not evaluated:
        return HeldOutTerms()
    needs_reference = any("ref_logprobs" in regularizer.term.needs for regularizer in regularizers)
    inputs = [
        (
            Outputs(
                entry.logprobs_DT,
                call(load_reference, reference, opaque_argument(entry.batch), step)
                if reference and needs_reference
                else None,
                entry.batch.sampling_logprobs_DT,
            ),
            entry.batch,
        )
        for entry in evaluated
    ]
    measured = HeldOutTerms()
    constant = [regularizer.name for regularizer in regularizers if _is_constant(regularizer, evaluated)]
    for name in constant:
        measured.failed[name] = (
            "every prompt has one completion there, whose score does not depend on the model; add other completions."
        )
    pending = [
        (regularizer.name, executor.measure(regularizer, inputs))
        for regularizer in regularizers
        if regularizer.name not in constant
    ]
    num_datums_B = [entry.batch.num_datums for entry in evaluated]
    digest = digest_batches([entry.batch for entry in evaluated])
    for name, wait in pending:
        try:
            evaluations = wait()
        except ObjectiveError as error:
            measured.failed[name] = str(error).replace(SKIP_HINT, "")  # a failure here never ends the run
        else:
            values = BatchValues([evaluation.value for evaluation in evaluations], num_datums_B, digest)
            measured.by_batch[name] = values
            mean, stderr = values.mean()
            measured.metrics[f"test/term/{name}/value"] = mean
            if not math.isnan(stderr):
                measured.metrics[f"test/term/{name}/stderr"] = stderr
    return measured


def digest_batches(batches: Sequence[Batch]) -> str:
    """Compute a digest of held-out batches that is the same in every evaluation of the same data.

    For sampled batches, whose completions differ, the digest covers the prompts; for other batches, all targets and
    their weights.
    """
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.num_datums.to_bytes(8, "big"))
        targets_D = unpack(batch.target_tokens_DT, batch.offsets_D)
        for targets, weights in zip(targets_D, unpack(batch.weights_DT, batch.offsets_D), strict=True):
            if batch.sampling_logprobs_DT is not None:
                prompt = targets[: int((weights != 0).int().argmax())]
                digest.update(prompt.numpy().tobytes() + b"|")
            else:
                digest.update(targets.numpy().tobytes() + weights.numpy().tobytes() + b"|")
    return digest.hexdigest()[:_DIGEST_LENGTH]


def append_batch_values(
    directory: RunDirectory, step: int, by_batch: Mapping[str, BatchValues], scores: Mapping[str, BatchValues]
) -> None:
    """Store the values of an evaluation with the run, if there are any.

    Args:
        by_batch: values of terms on each batch, by the name of the term.
        scores: scores of each problem, by the name of the metric.
    """
    if not (by_batch or scores):
        return
    kinds = {"terms": by_batch, "scores": scores}
    stored = {kind: {name: asdict(values) for name, values in entries.items()} for kind, entries in kinds.items()}
    directory.append_line(HELD_OUT_NAME, json.dumps({"step": step, **stored}))


def read_batch_values(directory: RunDirectory) -> dict[int, dict[str, BatchValues]]:
    """Read the stored values by step and by term or metric; a repeated evaluation replaces the values of its step.

    The name of a metric begins with `test/`; the name of a term contains no slash.
    """

    def values_of(record: dict[str, Any]) -> dict[str, BatchValues]:
        entries = {**record["terms"], **record.get("scores", {})}
        return {name: BatchValues(**entry) for name, entry in entries.items()}

    return dict(read_jsonl(directory, HELD_OUT_NAME, lambda record: (int(record["step"]), values_of(record))))


def _is_constant(regularizer: Regularizer, evaluated: Sequence[EvaluatedBatch]) -> bool:
    """Return whether a term compares the completions of each prompt, but fixed data has only one."""
    if regularizer.estimator not in ("minimum_risk", "minimum_risk_mean"):
        return False
    return not any(num_compared(entry.batch) for entry in evaluated)

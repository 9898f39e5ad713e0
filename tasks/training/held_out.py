"""Values of an objective's terms on held-out data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from blocks.storage import RunDirectory
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.estimators import num_compared
from objectives.term import Regularizer
from tasks.common.jsonl import read_jsonl
from tasks.common.task import call, opaque_argument
from tasks.training.reference import Reference, load_reference
from tasks.training.terms import TaskTermExecutor

HELD_OUT_NAME = "held_out_terms.jsonl"


@dataclass(frozen=True, slots=True)
class EvaluatedBatch:
    """Held-out batch with its logprobs.

    Attributes:
        batch: the packed datums.
        logprobs_DT: logprobs of the batch's targets under the evaluated weights, in nats.
    """

    batch: Batch
    logprobs_DT: Tensor


@runtime_checkable
class HeldOutData(Protocol):
    """Evaluator that keeps the batches of its last evaluation, so that terms can be measured on them."""

    @property
    def evaluated(self) -> Sequence[EvaluatedBatch]:
        """Batches of the last evaluation."""
        ...


@dataclass(frozen=True, slots=True)
class BatchValues:
    """Values of a term on each held-out batch, as stored for paired comparisons.

    Attributes:
        values_B: the values.
        num_datums_B: number of datums of each batch, which weights its value.
    """

    values_B: list[float]
    num_datums_B: list[int]

    def is_paired_with(self, other: BatchValues | None) -> bool:
        """Return whether other values are of batches of the same sizes."""
        return other is not None and self.num_datums_B == other.num_datums_B

    def minus(self, other: BatchValues) -> tuple[float, float]:
        """Mean difference of paired batches and its standard error."""
        differences = [a - b for a, b in zip(self.values_B, other.values_B, strict=True)]
        return weighted_mean(differences, self.num_datums_B)


@dataclass(frozen=True, slots=True)
class HeldOutTerms:
    """Measured values of terms on held-out data.

    Attributes:
        metrics: `test/term/<name>/value`, the mean over the batches weighted by their number of datums; and, for
            several batches, `test/term/<name>/stderr`, the standard error of that mean.
        by_batch: values of each batch, by the name of the term.
        failed: reasons why a term has no value, by its name.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    by_batch: dict[str, BatchValues] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measure_held_out(
    regularizers: Sequence[Regularizer],
    evaluated: Sequence[EvaluatedBatch],
    executor: TaskTermExecutor,
    reference: Reference | None,
    step: int,
) -> HeldOutTerms:
    """Measure the terms on held-out batches, concurrently.

    A term that fails here, for example because held-out data lacks its labels, ends no run, whatever its `on_error`.

    Args:
        reference: reference of the run, for terms that compare with it.
        step: step before which the weights are evaluated.
    """
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
    for name, wait in pending:
        try:
            evaluations = wait()
        except ObjectiveError as error:
            measured.failed[name] = str(error)
        else:
            values_B = [evaluation.value for evaluation in evaluations]
            measured.by_batch[name] = BatchValues(values_B, num_datums_B)
            mean, stderr = weighted_mean(values_B, num_datums_B)
            measured.metrics[f"test/term/{name}/value"] = mean
            if not math.isnan(stderr):
                measured.metrics[f"test/term/{name}/stderr"] = stderr
    return measured


def append_batch_values(directory: RunDirectory, step: int, by_batch: Mapping[str, BatchValues]) -> None:
    """Store the values of an evaluation with the run."""
    record = {"step": step, "terms": {name: asdict(values) for name, values in by_batch.items()}}
    directory.append_line(HELD_OUT_NAME, json.dumps(record))


def read_batch_values(directory: RunDirectory) -> dict[int, dict[str, BatchValues]]:
    """Read the stored values by step and term; those of a repeated evaluation replace earlier ones."""
    records = read_jsonl(
        directory,
        HELD_OUT_NAME,
        lambda record: (int(record["step"]), {name: BatchValues(**entry) for name, entry in record["terms"].items()}),
    )
    return dict(records)


def _is_constant(regularizer: Regularizer, evaluated: Sequence[EvaluatedBatch]) -> bool:
    """Return whether a term compares the completions of each prompt, but fixed data has only one."""
    if regularizer.estimator not in ("minimum_risk", "minimum_risk_mean"):
        return False
    return not any(num_compared(entry.batch) for entry in evaluated)


def weighted_mean(values_B: Sequence[float], weights_B: Sequence[float]) -> tuple[float, float]:
    """Weighted mean of values and its standard error, NaN for a single value; the values are independent samples.

    >>> weighted_mean([1.0, 3.0], [1, 1])
    (2.0, 1.0)
    """
    value_B = torch.tensor(values_B, dtype=torch.float64)
    weight_B = torch.tensor(weights_B, dtype=torch.float64) / sum(weights_B)
    mean = float(weight_B @ value_B)
    num_values = len(values_B)
    if num_values < 2:
        return mean, math.nan
    variance = float((weight_B**2) @ (value_B - mean) ** 2) * num_values / (num_values - 1)
    return mean, math.sqrt(variance)

"""Values of an objective's terms on held-out data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.estimators import num_compared
from objectives.evaluate import Evaluation
from objectives.term import Regularizer
from tasks.common.task import call, opaque_argument
from tasks.training.reference import Reference, load_reference
from tasks.training.terms import TaskTermExecutor


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
class HeldOutTerms:
    """Measured values of terms on held-out data.

    Attributes:
        metrics: `test/term/<name>/value`, the mean over the batches weighted by their number of datums; and, for
            several batches, `test/term/<name>/stderr`, the standard error of that mean.
        failed: reasons why a term has no value, by its name.
    """

    metrics: dict[str, float] = field(default_factory=dict)
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
            measured.metrics.update(_summarize(name, evaluations, num_datums_B))
    return measured


def _is_constant(regularizer: Regularizer, evaluated: Sequence[EvaluatedBatch]) -> bool:
    """Return whether a term compares the completions of each prompt, but fixed data has only one."""
    if regularizer.estimator not in ("minimum_risk", "minimum_risk_mean"):
        return False
    return not any(num_compared(entry.batch) for entry in evaluated)


def _summarize(name: str, evaluations_B: Sequence[Evaluation], num_datums_B: Sequence[int]) -> dict[str, float]:
    """Return the weighted mean of a term's values and its standard error, with batches as independent samples."""
    value_B = torch.tensor([evaluation.value for evaluation in evaluations_B], dtype=torch.float64)
    weight_B = torch.tensor(num_datums_B, dtype=torch.float64) / sum(num_datums_B)
    mean = float(weight_B @ value_B)
    metrics = {f"test/term/{name}/value": mean}
    num_batches = len(evaluations_B)
    if num_batches > 1:
        variance = float((weight_B**2) @ (value_B - mean) ** 2) * num_batches / (num_batches - 1)
        metrics[f"test/term/{name}/stderr"] = math.sqrt(variance)
    return metrics

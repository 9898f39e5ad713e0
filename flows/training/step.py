"""A step in flight: its minibatches before and after they are sent, and the time that the run waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.execution.term_loop import DueTerm, StepPosition, prepare_terms
from objectives.gradients.linearize import Linearized
from objectives.objective import Objective
from tasks.common.task import Pending, opaque_argument, submit
from tasks.training.checkpoints import PendingCheckpoint
from tasks.training.forward_backward import PendingOutput, PendingUpdate
from tasks.training.reference import Reference, load_reference
from tasks.training.terms import TaskTermExecutor


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Batch or minibatch with everything that is computed before its forward pass; all of it may be pending.

    Attributes:
        at: its step, and its share of the update.
        passes: maximum passes of the service over it: 1, or 2 if a forward pass may come first.
        batch: the packed datums.
        reference: the reference's logprobs, ``(N,)`` nats; None if no term needs them.
        terms: the terms due at the step, with their features.
        completed: for a batch of sampled candidates, the supervised batch whose prompts they complete; else None.
    """

    at: StepPosition
    passes: int
    batch: Pending[Batch]
    reference: Pending[Tensor] | None
    terms: tuple[DueTerm, ...]
    completed: Pending[Batch] | None = None

    @property
    def is_candidates(self) -> bool:
        """Return whether the batch holds sampled candidates."""
        return self.completed is not None

    def outputs(self, logprobs_DT: Tensor | None = None) -> Outputs:
        """Return the logprobs that the terms read; the current ones are 0 if they are not known yet."""
        batch = self.batch.result()
        if logprobs_DT is None:
            logprobs_DT = torch.zeros(batch.target_tokens_DT.shape)
        return Outputs(logprobs_DT, self.reference.result() if self.reference else None, batch.sampling_logprobs_DT)


@dataclass(frozen=True, slots=True)
class SentBatch:
    """Batch that has been sent, with its linearized objective if a forward pass came first.

    A batch that teaches nothing is only scored: its `update` is a forward pass.
    """

    prepared: PreparedBatch
    update: PendingUpdate
    linearized: Linearized | None
    is_only_scored: bool = False


@dataclass(frozen=True, slots=True)
class SentStep:
    """Step whose updates have been sent; `batches` is empty if the step is skipped.

    Attributes:
        batches: its minibatches.
        effect_passes: forward passes over the minibatches after the update, if its effects are measured.
        save: the save after the update, if one is due.
        elapsed_tokens: tokens of the batches sent up to and including this step, without candidates.
    """

    batches: Sequence[SentBatch]
    effect_passes: Sequence[PendingOutput]
    save: PendingCheckpoint | None
    elapsed_tokens: int


class StepTimes:
    """Durations of the steps, and of what the flow waits for within them."""

    def __init__(self) -> None:
        self._step_ended = perf_counter()
        self._waits: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the metric `time/<name>` of the step."""
        began = perf_counter()
        try:
            yield
        finally:
            self._waits[name] = self._waits.get(name, 0.0) + perf_counter() - began

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the duration and the waits of the step that ends now, and its trained and sampled tokens per second.

        Args:
            metrics: the other metrics of the step, with its tokens.
        """
        began, self._step_ended = self._step_ended, perf_counter()
        waits, self._waits = self._waits, {}
        seconds = self._step_ended - began
        times = {"time/step": seconds} | {f"time/{name}": wait for name, wait in waits.items()}
        for name, key in (("train", "num_tokens"), ("sample", "rollout/num_sampled_tokens")):
            if key in metrics:
                times[f"throughput/{name}_tokens_per_s"] = metrics[key] / seconds
        return times


def num_passes(objective: Objective, step: int, needs_forward_pass: bool) -> int:
    """Return the maximum passes of the service over a batch: 2 if its update may need the logprobs first."""
    return 2 if objective.base is not None or objective.due(step) or needs_forward_pass else 1


def num_pass_tokens(objective: Objective, tokens_by_step: Mapping[int, int], passes_by_step: Mapping[int, int]) -> int:
    """Return the tokens of all passes over the batches of some steps.

    Includes a forward pass for each step whose effects are measured, and one over the last batch, which checks the
    final weights.

    Args:
        tokens_by_step: tokens of the batch of each step that is not skipped.
        passes_by_step: passes of the update of each of these steps.
    """
    in_passes = sum(
        num_tokens * (passes_by_step[step] + objective.measures_effects(step))
        for step, num_tokens in tokens_by_step.items()
    )
    return in_passes + (tokens_by_step[max(tokens_by_step)] if tokens_by_step else 0)


def prepare_batch(
    batch: Pending[Batch],
    objective: Objective,
    reference: Reference | None,
    executor: TaskTermExecutor,
    at: StepPosition,
    passes: int,
) -> PreparedBatch:
    """Start the work that needs only the batch: the features of its terms and the reference logprobs."""
    terms = prepare_terms(objective, batch, at, executor)
    loaded = cast(Batch, batch)  # a task receives the result of a future that is passed to it
    pending = submit(load_reference, reference, opaque_argument(loaded), at.step) if reference else None
    return PreparedBatch(at, passes, batch, pending, terms)

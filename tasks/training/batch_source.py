"""Interface through which the training loop loads a method's batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import tinker
from torch import Tensor

from objectives.batch import Batch
from objectives.term_weights.targets import TargetSpec
from tasks.common.task import Pending


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Batch that a step has trained on.

    Attributes:
        batch: the batch.
        logprobs_DT: logprobs of the batch's targets, in nats, under the weights at which the gradient was computed.
        by_datum: per-datum values of terms, ``(D,)``, by term name.
    """

    batch: Batch
    logprobs_DT: Tensor
    by_datum: Mapping[str, Tensor] = field(default_factory=dict)


class MetricWarning(NamedTuple):
    """Warning about a metric that has been beyond a limit for long enough.

    Attributes:
        check: name of the check, or the condition of an alert.
        step: last step at which the metric was beyond the limit.
        figure: value of the metric at this step.
        text: one sentence for the user.
    """

    check: str
    step: int
    figure: float
    text: str


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Counts of prompt tokens and sampled tokens.

    Attributes:
        num_prefill_tokens: prompt tokens, once for each sample.
        num_sample_tokens: sampled tokens.
        num_cached_tokens: part of the prompt tokens that the service bills as hits of its prefix cache.
        num_scoring_tokens: part of the sampled tokens that belongs to requests for the logprobs of a sequence: the
            service samples and bills one token for each.
    """

    num_prefill_tokens: int = 0
    num_sample_tokens: int = 0
    num_cached_tokens: int = 0
    num_scoring_tokens: int = 0

    def __add__(self, other: SampledTokens) -> SampledTokens:
        return SampledTokens(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))

    def beyond(self, other: SampledTokens) -> SampledTokens:
        """Return the amount by which each count exceeds the same count of `other`, at least 0.

        >>> SampledTokens(3, 2).beyond(SampledTokens(1, 5)) == SampledTokens(2, 0)
        True
        """
        counts = zip(astuple(self), astuple(other), strict=True)
        return SampledTokens(*(max(0, count - part) for count, part in counts))

    def times(self, num: float) -> SampledTokens:
        return SampledTokens(*(round(num * count) for count in astuple(self)))


class BatchSource(ABC):
    """Source of a run's batches.

    Attributes:
        sampled: True if the model in training samples the batches, so that they cannot be loaded before the updates on
            which they depend.
        num_minibatches: minibatches per update; their gradients add up.
    """

    sampled: bool = False
    num_minibatches: int = 1

    def __init__(self) -> None:
        self._warnings: dict[str, str] = {}

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""

    @abstractmethod
    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Start loading the minibatches of a step.

        Samples are drawn from the weights after all updates sent so far; in mode `async`, from weights of bounded age.
        """

    def untrained_steps(self, steps: range) -> Sequence[int]:
        """Return the steps whose batches have nothing to train, such as no token of non-zero weight."""
        return ()

    def token_counts(self) -> Mapping[int, int]:
        """Return the number of tokens of each batch that `untrained_steps` has read, by step."""
        return {}

    def teaches(self, step: int) -> bool:
        """Return whether the base loss has a gradient on the loaded batch of a step.

        If not, and if no term trains either, the update is skipped.
        """
        return True

    def skip(self, step: int) -> None:
        """Note that the update of a loaded step is skipped. After a restart, such a step is not even loaded."""
        return

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        """Return the source's metrics for a step; called once per step.

        Args:
            step: the step.
            trained: minibatches of the step, after training.
            terms: logged metrics of the objective's terms.
        """
        return {}

    @property
    def targets(self) -> Mapping[str, TargetSpec]:
        """Targets that the source controls, by the prefix of their metrics."""
        return {}

    def pop_warnings(self) -> dict[str, str]:
        """Return the warnings since the last call by the suffix of their MLflow tags; called after each step."""
        warnings, self._warnings = self._warnings, {}
        return warnings

    def observe(self, step: int, metrics: Mapping[str, float]) -> Sequence[MetricWarning]:
        """Check all metrics of a step; return warnings about failures that have lasted."""
        return ()

    def take_sampled(self) -> SampledTokens:
        """Return the sampled tokens that were charged to steps since the last call.

        Those of groups that no step has used yet are missing; `sampled_for` and `stop_sampling` return them.
        """
        return SampledTokens()

    def sampled_for(self, step: int) -> tuple[SampledTokens, SampledTokens]:
        """Return the tokens sampled for a loaded step, and all that `take_sampled` has not returned yet."""
        return SampledTokens(), SampledTokens()

    def stop_sampling(self) -> SampledTokens:
        """Start no further rollouts; return the tokens sampled so far that belong to no trained step."""
        return SampledTokens()

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        """Prepare to load batches from a step on, in a new or resumed run.

        Args:
            step: first step.
            num_steps: number of steps of the run.
            state: value that `state` returned in the run to resume, or in the parent of a fork; empty for a new run.
        """
        return

    def state(self, step: int) -> dict[str, Any]:
        """Return the source's state at a step as JSON data, for a later `begin`."""
        return {}

    def close(self) -> None:
        """Cancel pending work."""
        return

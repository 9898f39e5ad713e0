"""Steps of a `RolloutSource` with groups of two members, whose prompts begin with the number of their group, from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from objectives.batch import Batch
from tasks.common.task import Pending
from tasks.rl.rollout_source import RolloutSource
from tasks.training.batch_source import SampledTokens, TrainedBatch


def numbers_of(batch: Batch) -> list[int]:
    """Numbers of the groups in a minibatch."""
    return [datum.model_input.to_ints()[0] - 1 for datum in batch.datums][::2]


@dataclass(frozen=True)
class Step:
    numbers: list[list[int]]
    metrics: dict[str, float]
    sampled: SampledTokens
    tokens: list[list[int]]


def take(source: RolloutSource, step: int, snapshots: Any) -> Step:
    return finish(source, step, source.load(step, snapshots))


def finish(source: RolloutSource, step: int, pending: Sequence[Pending[Batch]]) -> Step:
    batches = [minibatch.result() for minibatch in pending]
    trained = [TrainedBatch(batch, cast(Any, batch.sampling_logprobs_DT)) for batch in batches]
    metrics = source.metrics(step, trained, {"loss/base": 0.0})
    tokens = [batch.target_tokens_DT.tolist() for batch in batches]
    return Step([numbers_of(batch) for batch in batches], metrics, source.take_sampled(), tokens)

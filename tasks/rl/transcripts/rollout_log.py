"""Readable record of a step's rollouts and of the objective's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tinker
from tinker_cookbook.tokenizer_utils import Tokenizer

from objectives.labels import MEMBER
from objectives.term import BASE
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import GROUP_INDEX
from tasks.training.batch_source import TrainedBatch


@dataclass(frozen=True, slots=True)
class Transcript:
    """Readable record of a step's rollouts.

    Attributes:
        groups: all groups of the step, trained on or not.
        values: value of each term over the step.
        scores: mean of each term over a member's datums, by group and member index; dropped members have none.
    """

    groups: Sequence[Group]
    values: Mapping[str, float]
    scores: Mapping[tuple[int, int], Mapping[str, float]]


def make_transcript(
    parts: Sequence[Sequence[Group]], trained: Sequence[TrainedBatch], metrics: Mapping[str, float]
) -> Transcript:
    """Join the groups of each minibatch with the values of the terms.

    Args:
        parts: groups of each minibatch, followed by groups that belong to none.
        trained: minibatches of the step.
        metrics: metrics of the step.
    """
    values = {name: metrics[key] for key in metrics if (name := _term_of(key)) not in ("", BASE)}
    scores: dict[tuple[int, int], Mapping[str, float]] = {}
    first = 0
    for part, minibatch in zip(parts, trained, strict=False):
        labels_D = minibatch.batch.labels_D
        places = zip((labels_D[GROUP_INDEX] + first).tolist(), labels_D[MEMBER].tolist(), strict=True)
        data: dict[tuple[int, int], list[int]] = {}
        for index, place in enumerate(places):
            data.setdefault(place, []).append(index)
        for place, indices in data.items():  # one member's turns may be several datums
            scores[place] = {name: by_D[indices].mean().item() for name, by_D in minibatch.by_datum.items()}
        first += len(part)
    return Transcript([group for part in parts for group in part], values, scores)


def prompt_text(tokenizer: Tokenizer, prompt: tinker.ModelInput) -> str:
    """Text of a prompt; chunks of another kind appear as `[kind]`."""
    return "".join(
        str(tokenizer.decode(list(chunk.tokens))) if isinstance(chunk, tinker.EncodedTextChunk) else f"[{chunk.type}]"
        for chunk in prompt.chunks
    )


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Names and values of metrics on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _term_of(key: str) -> str:
    """Term whose value the metric is; empty for other metrics."""
    kind, _, rest = key.partition("/")
    name, _, figure = rest.rpartition("/")
    return name if kind == "term" and figure == "value" and "/" not in name else ""

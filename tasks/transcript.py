"""What was played for a step, with what the terms of the objective say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tinker
from tinker_cookbook.tokenizer_utils import Tokenizer

from objectives.regularizer import BASE
from tasks.rollout import Group
from tasks.source import Trained
from tasks.trajectories import MEMBER, PLAYED


@dataclass(frozen=True, slots=True)
class Transcript:
    """A step, to be read.

    Attributes:
        groups: all that were played for it, trained on or not.
        values: of each term over the step.
        scores: of each term that has them, at a member of a group, by both their numbers; none of what was left out.
    """

    groups: Sequence[Group]
    values: Mapping[str, float]
    scores: Mapping[tuple[int, int], Mapping[str, float]]


def make_transcript(
    parts: Sequence[Sequence[Group]], trained: Sequence[Trained], metrics: Mapping[str, float]
) -> Transcript:
    """Join the groups of each minibatch with what the terms said of it.

    Args:
        parts: the groups of each minibatch, then those that are of none.
        trained: the minibatches.
        metrics: of the step.
    """
    values = {name: metrics[key] for key in metrics if (name := _term_of(key)) not in ("", BASE)}
    scores: dict[tuple[int, int], Mapping[str, float]] = {}
    first = 0
    for part, minibatch in zip(parts, trained, strict=False):
        labels_D = minibatch.batch.labels_D
        places = zip((labels_D[PLAYED] + first).tolist(), labels_D[MEMBER].tolist(), strict=True)
        data: dict[tuple[int, int], list[int]] = {}
        for index, place in enumerate(places):
            data.setdefault(place, []).append(index)
        for place, indices in data.items():  # one member's turns may be several datums
            scores[place] = {name: by_D[indices].mean().item() for name, by_D in minibatch.by_datum.items()}
        first += len(part)
    return Transcript([group for part in parts for group in part], values, scores)


def prompt_text(tokenizer: Tokenizer, prompt: tinker.ModelInput) -> str:
    """A prompt as text; what is no text by its kind."""
    return "".join(
        str(tokenizer.decode(list(chunk.tokens))) if isinstance(chunk, tinker.EncodedTextChunk) else f"[{chunk.type}]"
        for chunk in prompt.chunks
    )


def figures_text(figures: Mapping[str, float]) -> str:
    """Figures on one line."""
    return ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items())


def _term_of(key: str) -> str:
    """The term whose value a metric is; empty for another metric."""
    kind, _, rest = key.partition("/")
    name, _, figure = rest.rpartition("/")
    return name if kind == "term" and figure == "value" and "/" not in name else ""

"""What a run trains on, step by step, whatever its method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tinker
from torch import Tensor

from objectives.batch import Batch
from tasks.options import Pending


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch that was trained on.

    Attributes:
        logprobs_DT: nats, of its targets under the weights that its gradient was taken at.
        by_datum: what terms say of each datum, ``(D,)``, by their names.
    """

    batch: Batch
    logprobs_DT: Tensor
    by_datum: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of prompts that were sampled from, and those that were sampled."""

    num_prefill_tokens: int = 0
    num_sample_tokens: int = 0

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(
            self.num_prefill_tokens + other.num_prefill_tokens, self.num_sample_tokens + other.num_sample_tokens
        )


class Source(ABC):
    """Where the batches of a run come from.

    Attributes:
        sampled: whether batches are sampled from the weights that their step starts from, not to be loaded before.
        num_minibatches: of one update; their gradients add up.
    """

    sampled: bool = False
    num_minibatches: int = 1

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int: ...

    @abstractmethod
    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Start on the minibatches of a step, by the weights of every update that the client was sent before."""

    def metrics(self, step: int, trained: Sequence[Trained], terms: Mapping[str, float]) -> dict[str, float]:
        """What there is to say of the minibatches of a step; once.

        Args:
            terms: what the objective's terms say of them, as it is logged.
        """
        return {}

    def take_sampled(self) -> Sampled:
        """What was sampled since the last time."""
        return Sampled()

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        """Go on at a step of so many, with the state of a run that came there; an empty one where it had none."""
        return

    def state(self, step: int) -> dict[str, Any]:
        """What a run needs to go on at a step, beside its number, as plain data."""
        return {}

    def close(self) -> None:
        """End what is still under way."""
        return

"""What a run trains on, step by step, whatever its method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import tinker
from torch import Tensor

from objectives.batch import Batch
from tasks.options import Pending


class Source(Protocol):
    """Where the batches of a run come from."""

    @property
    def sampled(self) -> bool:
        """Whether a batch is sampled from the weights that its step starts from, and so can't be loaded before."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def load(self, step: int, client: tinker.TrainingClient) -> Pending[Batch]:
        """Start on the batch of a step, by the weights of every update that the client was sent before."""
        ...

    def metrics(self, step: int, batch: Batch, logprobs_DT: Tensor, terms: Mapping[str, float]) -> dict[str, float]:
        """What there is to say of the batch of a step; once.

        Args:
            logprobs_DT: nats, of its targets under the weights that the step starts from.
            terms: what the objective's terms say of it, as it is logged.
        """
        ...

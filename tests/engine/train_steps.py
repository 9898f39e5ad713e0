"""Training steps through the SDK."""

from __future__ import annotations

import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2)


def train(trainer: tinker.TrainingClient, batch: list[types.Datum], num_steps: int) -> list[float]:
    """Run updates on one batch; return the loss before each update."""
    losses = []
    for _ in range(num_steps):
        output = trainer.forward_backward(batch, "cross_entropy")
        updated = trainer.optim_step(ADAM)
        losses.append(output.result().metrics["loss:sum"])
        updated.result()
    return losses

"""Training client that responds immediately, so that a step measures everything except the service."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

import tinker
import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

T = TypeVar("T")


class EmptyService:
    """Client for batches of one shape; always returns the same logprobs, between -5 and -0.1 nats."""

    def __init__(self, num_datums: int, num_tokens: int) -> None:
        logprobs_T = types.TensorData.from_torch(-torch.linspace(0.1, 5.0, num_tokens))
        self._output = types.ForwardBackwardOutput("TorchLossReturn", [{"logprobs": logprobs_T}] * num_datums)

    def forward(self, data: Sequence[tinker.Datum], loss_fn: str) -> tinker.APIFuture[types.ForwardBackwardOutput]:
        return _completed(self._output)

    def forward_backward(
        self, data: Sequence[tinker.Datum], loss_fn: str
    ) -> tinker.APIFuture[types.ForwardBackwardOutput]:
        return _completed(self._output)

    def optim_step(self, adam_params: types.AdamParams) -> tinker.APIFuture[types.OptimStepResponse]:
        return _completed(types.OptimStepResponse(metrics={}))

    def as_client(self) -> tinker.TrainingClient:
        """Return the object typed as the client that the tasks expect."""
        return cast(tinker.TrainingClient, self)


def _completed(value: T) -> tinker.APIFuture[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return AwaitableConcurrentFuture(future)

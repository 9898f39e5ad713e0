"""Custom loss: runs its graph on each datum and sums the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compute.datum import Datum
from engine.compute.loss import LossValue
from engine.custom_loss.arguments import resolve
from engine.custom_loss.graph import Call, Graph
from engine.custom_loss.limits import Limits
from engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """Traced loss, run by the engine. Implements `engine.compute.loss.Loss`."""

    graph: Graph

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.graph.ranks)[1:]

    def prepare(self, datum: Datum, index: int) -> Datum:
        inputs = dict(datum.inputs)
        for name, rank in self.graph.ranks.items():
            value = datum.targets if name == "logprobs" else inputs.get(name)
            if value is None:
                raise RequestError(
                    f"Datum {index} has no {name} in its loss_fn_inputs, but the custom loss {self.graph.name!r} reads "
                    "it: send it with every datum."
                )
            if rank == 0 and value.numel() == 1:  # a scalar arrives with the shape (1,)
                value = inputs[name] = value.reshape(())
            if value.dim() != rank:
                raise RequestError(
                    f"Datum {index} has {name} of rank {value.dim()}, but the custom loss {self.graph.name!r} declares "
                    f"rank {rank}: send this rank, or create the loss with other input ranks."
                )
        return Datum(datum.tokens_T, datum.targets, inputs)

    def trained_mask(self, datum: Datum) -> Tensor:
        return torch.ones(datum.targets.shape, dtype=torch.bool)

    def compute(self, logprobs_M: Tensor, data_B: Sequence[Datum]) -> LossValue:
        total = torch.zeros(())
        metrics_B: list[dict[str, float]] = []
        limits = Limits()
        flat_B = logprobs_M.cpu().split([datum.targets.numel() for datum in data_B])
        for datum, flat in zip(data_B, flat_B, strict=True):
            loss, metrics = self._run(flat.reshape(datum.targets.shape).clone(), datum, limits)
            total = total + loss
            metrics_B.append(metrics)
        return LossValue(total, metrics_B)

    def _run(self, logprobs: Tensor, datum: Datum, limits: Limits) -> tuple[Tensor, dict[str, float]]:
        graph = self.graph
        values: dict[str, Any] = {"logprobs": logprobs, **datum.inputs}
        for call in graph.calls:
            try:
                values[call.name] = _evaluate(call, values, limits)
            except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())
                raise RequestError(
                    f"The custom loss {graph.name!r} failed at {call.name} ({call.title}) on a datum of "
                    f"{len(datum.targets)} tokens: {reason[:300].rstrip('.')}."
                ) from error
        loss = values[graph.loss]
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            raise RequestError(
                f"The custom loss {graph.name!r} returned {_describe(loss)} as its loss, but a floating-point scalar "
                "is expected: reduce it, for example with sum()."
            )
        if logprobs.requires_grad and not loss.requires_grad:
            raise RequestError(
                f"The custom loss {graph.name!r} does not depend on the logprobs through differentiable operations, "
                "so it would train nothing: remove detach() and comparisons from its path."
            )
        return loss, {key: self._metric(key, values[name]) for key, name in graph.metrics.items()}

    def _metric(self, key: str, value: object) -> float:
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise RequestError(
                f"The custom loss {self.graph.name!r} returned {_describe(value)} as {key}, but a scalar is expected: "
                "reduce it, for example with mean()."
            )
        return float(value.detach() if isinstance(value, Tensor) else value)


def _evaluate(call: Call, values: dict[str, Any], limits: Limits) -> object:
    args, kwargs = resolve(call.args, values), resolve(call.kwargs, values)
    limits.check_before(call.operation, args, kwargs)
    result = call.operation(*args, **kwargs)
    limits.check_after(result)
    return result


def _describe(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

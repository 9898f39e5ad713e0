"""What a forward_backward needs of a loss: what it reads, where it has a gradient, and its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.compute.datum import Datum
from engine.errors import RequestError
from objectives.errors import ObjectiveError
from objectives.losses import BuiltInLoss, find_built_in
from objectives.losses.built_in import CLIP_HIGH, CLIP_LOW
from objectives.losses.ratios import Threshold


class LossValue(NamedTuple):
    """A loss of some datums.

    Attributes:
        total: 0-d: the sum over them.
        metrics_B: of each datum, by ``name:reduction``.
    """

    total: Tensor
    metrics_B: Sequence[Mapping[str, float]]


class Loss(Protocol):
    """A loss with its parameters; the value of a batch is the sum over its datums."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The ``loss_fn_inputs`` that it reads; others are ignored."""
        ...

    def prepare(self, datum: Datum, index: int) -> Datum:
        """The datum with its inputs complete; raises a RequestError that names datum ``index``."""
        ...

    def trained(self, datum: Datum) -> Tensor:
        """Bool, shaped as the targets: where the loss may have a gradient."""
        ...

    def compute(self, logprobs_M: Tensor, data_B: Sequence[Datum]) -> LossValue:
        """The loss of some datums, from the logprobs ``(M,)`` of all their targets, datum by datum."""
        ...


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """A built-in loss with its parameters."""

    loss: BuiltInLoss
    params: Mapping[str, float]

    @property
    def inputs(self) -> tuple[str, ...]:
        # A datum may bring its own bounds, which the SDK lists among its inputs.
        return (*self.loss.inputs, *((CLIP_LOW, CLIP_HIGH) if self.loss.clips else ()))

    def prepare(self, datum: Datum, index: int) -> Datum:
        shape = datum.targets.shape
        if self.loss.is_policy_loss and datum.targets.dim() != 1:
            raise RequestError(
                f"Datum {index} has target_tokens of shape {tuple(shape)}, but the loss {self.loss.name!r} takes one "
                "target per token: send shape (T,)."
            )
        inputs = {name: value.float() for name, value in datum.inputs.items()}
        if self.loss.name == "cross_entropy":
            inputs.setdefault("weights", torch.ones(shape))
        for name in self.loss.inputs:
            if name not in inputs:
                raise RequestError(
                    f"Datum {index} has no {name} in its loss_fn_inputs, and the loss {self.loss.name!r} reads "
                    f"{', '.join(self.loss.inputs)}: send one number per target."
                )
        for name in inputs.keys() - set(self.loss.inputs):
            if inputs[name].numel() == 1:
                inputs[name] = inputs[name].expand(shape)
        for name, value in inputs.items():
            _check_values(value, f"{name} of datum {index}", shape)
        return Datum(datum.tokens_T, datum.targets, inputs)

    def trained(self, datum: Datum) -> Tensor:
        if self.loss.decisive is None:
            return torch.ones(datum.targets.shape, dtype=torch.bool)
        return datum.inputs[self.loss.decisive] != 0

    def compute(self, logprobs_M: Tensor, data_B: Sequence[Datum]) -> LossValue:
        device = logprobs_M.device
        inputs = {
            name: torch.cat([datum.inputs[name].flatten() for datum in data_B]).to(device) for name in self.loss.inputs
        }
        offsets_B = torch.tensor([0, *(datum.targets.numel() for datum in data_B)]).cumsum(0).to(device)
        params = {name: self._param(name, data_B, device) for name in self.params}
        total = self.loss.compute(logprobs_M, inputs, offsets_B, params)
        if not self.loss.is_policy_loss:
            return LossValue(total, [{}] * len(data_B))
        metrics = self.loss.compute_metrics(logprobs_M, inputs, offsets_B, params)
        columns = {"ratio:mean": metrics.mean_D, "ratio:max": metrics.max_D, "kl_k1:mean": metrics.kl_k1_D}
        if self.loss.clips:
            columns["clip_fraction:mean"] = metrics.clip_fraction_D
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return LossValue(total, [dict(zip(columns, row, strict=True)) for row in rows])

    def _param(self, name: str, data_B: Sequence[Datum], device: torch.device) -> Threshold:
        if not any(name in datum.inputs for datum in data_B):
            return self.params[name]
        default = torch.tensor(self.params[name])
        return torch.cat([datum.inputs.get(name, default.expand(datum.targets.shape)) for datum in data_B]).to(device)


def bind_loss(name: str, config: Mapping[str, float | str]) -> BoundLoss:
    """The built-in loss called ``name`` under a ``loss_fn_config``.

    Raises:
        RequestError: there is no such loss, or a parameter is wrong.
    """
    try:
        loss = find_built_in(name)
        return BoundLoss(loss, loss.check_params(config))
    except ObjectiveError as error:
        raise RequestError(str(error)) from error


def _check_values(value: Tensor, name: str, shape: torch.Size) -> None:
    if value.shape != shape:
        raise RequestError(
            f"{name} has the shape {tuple(value.shape)}, but target_tokens have {tuple(shape)}: send one number per "
            "target."
        )
    if not bool(value.isfinite().all()):
        raise RequestError(f"{name} has a number that is not finite: check where it comes from.")

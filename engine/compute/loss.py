"""Interface between losses and forward_backward, and the built-in losses."""

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
from objectives.losses.policy.ratios import Threshold
from objectives.losses.registry import CLIP_HIGH, CLIP_LOW


class LossValue(NamedTuple):
    """Loss of several datums.

    Attributes:
        total: 0-d sum over the datums.
        metrics_B: metrics of each datum, keyed by ``name:reduction``.
    """

    total: Tensor
    metrics_B: Sequence[Mapping[str, float]]


class Loss(Protocol):
    """Loss with bound parameters. The loss of a batch is the sum of the losses of its datums."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the ``loss_fn_inputs`` that the loss reads; it ignores all other inputs."""
        ...

    def prepare(self, datum: Datum, index: int) -> Datum:
        """Validate a datum's inputs and fill in defaults; raise a RequestError that names datum ``index``."""
        ...

    def trained_mask(self, datum: Datum) -> Tensor:
        """Return a bool mask of the targets' shape: True where the loss can have a gradient."""
        ...

    def compute(self, logprobs_M: Tensor, data_B: Sequence[Datum]) -> LossValue:
        """Compute the loss of several datums from the logprobs ``(M,)`` of their targets, concatenated by datum."""
        ...


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """Built-in loss with bound parameters."""

    loss: BuiltInLoss
    params: Mapping[str, float]

    @property
    def inputs(self) -> tuple[str, ...]:
        # A datum can set its own clip thresholds among its loss_fn_inputs, as in the SDK.
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
                    f"Datum {index} has no {name} in its loss_fn_inputs, but the loss {self.loss.name!r} requires "
                    f"{', '.join(self.loss.inputs)}: send one number per target for each."
                )
        for name in inputs.keys() - set(self.loss.inputs):  # clip thresholds: one number may apply to all targets
            if inputs[name].numel() == 1:
                inputs[name] = inputs[name].reshape(()).expand(shape)
        for name, value in inputs.items():
            _check_values(value, f"{name} of datum {index}", shape)
        if inputs.keys() & {CLIP_LOW, CLIP_HIGH}:
            self._check_thresholds(inputs, index)
        return Datum(datum.tokens_T, datum.targets, inputs)

    def _check_thresholds(self, inputs: Mapping[str, Tensor], index: int) -> None:
        """Apply the rules of `BuiltInLoss.check_params` to the thresholds that datum ``index`` sets itself."""
        low, high = (inputs.get(name, torch.tensor(self.params[name])) for name in (CLIP_LOW, CLIP_HIGH))
        for name, value in ((CLIP_LOW, low), (CLIP_HIGH, high)):
            if bool((value < 0).any()):
                raise RequestError(f"{name} of datum {index} contains {value.min():g}; use numbers of at least 0.")
        low, high = torch.broadcast_tensors(low, high)
        if bool((crossed := low > high).any()):
            raise RequestError(
                f"Datum {index} has {CLIP_LOW}={low[crossed][0]:g} above {CLIP_HIGH}={high[crossed][0]:g}; set them in "
                "ascending order, as bounds of the ratio itself (0.8, not 0.2)."
            )

    def trained_mask(self, datum: Datum) -> Tensor:
        if self.loss.gating_input is None:
            return torch.ones(datum.targets.shape, dtype=torch.bool)
        return datum.inputs[self.loss.gating_input] != 0

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
        """Return the value of a parameter: one number, or one per target if a datum sets its own."""
        if not any(name in datum.inputs for datum in data_B):
            return self.params[name]
        default = torch.tensor(self.params[name])
        return torch.cat([datum.inputs.get(name, default.expand(datum.targets.shape)) for datum in data_B]).to(device)


def bind_loss(name: str, config: Mapping[str, float | str]) -> BoundLoss:
    """Return the built-in loss ``name`` with the parameters of a ``loss_fn_config``.

    Raises:
        RequestError: the loss is unknown, or a parameter is invalid.
    """
    try:
        loss = find_built_in(name)
        return BoundLoss(loss, loss.check_params(config))
    except ObjectiveError as error:
        raise RequestError(str(error)) from error


def _check_values(value: Tensor, name: str, shape: torch.Size) -> None:
    if value.shape != shape:
        raise RequestError(
            f"{name} has the shape {tuple(value.shape)}, but target_tokens has {tuple(shape)}: send one number per "
            "target."
        )
    if not bool(value.isfinite().all()):
        raise RequestError(f"{name} contains a value that is not finite: check how it is computed.")

"""AdamW for one adapter, identical to `torch.optim.AdamW`; its state is keyed by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tinker.types import AdamParams
from torch import Tensor

from engine.compute.lora import Adapter
from engine.errors import RequestError


class Optimizer:
    """AdamW steps and moments of one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._parameters = dict(adapter.named_parameters())
        self._adam = torch.optim.AdamW(self._parameters.values(), fused=True)

    def step(self, params: AdamParams) -> float | None:
        """Update the weights from the accumulated gradient, then clear the gradient.

        A step without a gradient changes nothing, as in PyTorch.

        Returns:
            Norm of the gradient before clipping; None without clipping.

        Raises:
            RequestError: a parameter is out of range, or the gradient is not finite; the weights are unchanged.
        """
        _check(params)
        try:
            norm = None
            if params.grad_clip_norm > 0:
                norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), params.grad_clip_norm))
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            if not bool(torch.nn.utils.get_total_norm(gradients, norm_type=math.inf).isfinite()):
                raise RequestError(
                    "The gradient is not finite, so it was dropped and the weights are unchanged: "
                    "check the loss, or lower the learning rate."
                )
            (group,) = self._adam.param_groups
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
            self._adam.step()
            return norm
        finally:
            self.clear_gradient()

    def clear_gradient(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    @property
    def num_bytes(self) -> int:
        """Memory of the moments and step counts."""
        return sum(value.nbytes for state in self._adam.state.values() for value in state.values())

    def state(self) -> dict[str, Tensor]:
        """Return all moments and step counts as ``<parameter>.<moment>``; empty before the first step."""
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a result of `state`, bit for bit."""
        for name, parameter in self._parameters.items():
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in state]
            if keys:
                self._adam.state[parameter] = {key: state[f"{name}.{key}"].clone().to(parameter.device) for key in keys}


def _check(params: AdamParams) -> None:
    for name, limit in (
        ("learning_rate", math.inf),
        ("beta1", 1),
        ("beta2", 1),
        ("eps", math.inf),
        ("weight_decay", math.inf),
        ("grad_clip_norm", math.inf),
    ):
        value = getattr(params, name)
        if not 0 <= value < limit:
            allowed = "a finite number of at least 0" if limit == math.inf else f"at least 0 and less than {limit}"
            raise RequestError(f"{name} of the optimizer is {value}; use {allowed}.")

"""AdamW for one adapter, identical to `torch.optim.AdamW`; its state is keyed by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
            RequestError: a parameter is out of range, and the gradient is kept; or an element of the clipped gradient,
                or its square, is not finite, and the gradient is dropped. The weights are unchanged.
        """
        _check(params)
        try:
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            norm = self._clip(gradients, params.grad_clip_norm) if params.grad_clip_norm > 0 else None
            _check_size(float(torch.nn.utils.get_total_norm(gradients, norm_type=math.inf)))
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

    def _clip(self, gradients: Sequence[Tensor], max_norm: float) -> float:
        """Scale the gradient to a norm of at most ``max_norm``; return its norm before."""
        norm = torch.nn.utils.get_total_norm(gradients)
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), max_norm, norm)
            return float(norm)
        # The squares overflow float32.
        exact = math.hypot(*(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients))
        for gradient in gradients:
            gradient.copy_(gradient.double() * min(1.0, max_norm / exact))
        return exact


def _check_size(largest: float) -> None:
    """Raise a RequestError if the largest absolute value of a gradient, or its square in the moments, is not finite."""
    if not math.isfinite(largest):
        raise RequestError(
            "The gradient is not finite, so it was dropped and the weights are unchanged: "
            "check the loss, or lower the learning rate."
        )
    if largest**2 > torch.finfo(torch.float32).max:
        raise RequestError(
            f"The gradient has an element of size {largest:.3g}, whose square is not finite, so it was dropped and the "
            "weights are unchanged: check the loss, or set grad_clip_norm."
        )


def _check(params: AdamParams) -> None:
    for name, least, limit in (
        ("learning_rate", 0, math.inf),
        ("beta1", 0, 1),
        ("beta2", 0, 1),
        # With an eps of 0, the update of a weight whose gradient has always been 0 would be 0 / 0, for example of
        # LoRA's matrix A at the first step, when B is 0.
        ("eps", torch.finfo(torch.float32).tiny, math.inf),
        ("weight_decay", 0, math.inf),
        ("grad_clip_norm", 0, math.inf),
    ):
        value = getattr(params, name)
        if not least <= value < limit:
            allowed = f"at least 0 and less than {limit}" if limit == 1 else f"a finite number of at least {least:g}"
            raise RequestError(f"{name} of the optimizer is {value}; use {allowed}.")

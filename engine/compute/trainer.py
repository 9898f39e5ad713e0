"""One adapter in training: its weights, its optimizer and whether its gradient can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tinker.types import AdamParams
from torch import Tensor

from engine.compute.base import BaseModel
from engine.compute.datum import Datum, check_datum
from engine.compute.lora import Adapter, Factors, LoraSpec
from engine.compute.loss import Loss
from engine.compute.optimizer import Optimizer
from engine.compute.parts import Parts
from engine.compute.train import LossOutput, loss_parts
from engine.errors import EngineError, RequestError

_PEFT_PREFIX = "base_model.model."


class Trainer:
    """The state that training requests change; only the compute thread touches it.

    A forward_backward that fails leaves no part of its gradient behind: the optimizer step that follows fails
    as well, and the next batch starts clean. Otherwise a client that had sent both at once would step on half
    a batch without knowing.

    Attributes:
        micro_batch_tokens: of one forward pass, padding included.
        lost: why the gradient gathered so far lacks a part, if it does.
    """

    def __init__(self, base: BaseModel, spec: LoraSpec, micro_batch_tokens: int) -> None:
        self.base = base
        self.adapter = base.new_adapter(spec)
        self._optimizer = Optimizer(self.adapter)
        self.micro_batch_tokens = micro_batch_tokens
        self.lost: str | None = None

    def forward_backward(self, data_D: Sequence[Datum], loss: Loss, forward_only: bool) -> Parts[LossOutput]:
        """Logprobs and loss of a batch, in parts; adds its gradient unless ``forward_only``.

        Raises:
            RequestError: a datum that the model or the loss cannot take.
        """
        if not data_D:
            raise RequestError("The batch is empty: send at least one datum.")
        for index, datum in enumerate(data_D):
            check_datum(datum, index, self.base.loaded.vocab_size, self.base.loaded.max_context)
        data_D = [loss.prepare(datum, index) for index, datum in enumerate(data_D)]
        parts = loss_parts(self.base, self.adapter, data_D, loss, self.micro_batch_tokens, backward=not forward_only)
        return (yield from parts)

    def lose_batch(self, reason: str) -> None:
        """Note that the gradient gathered so far lacks a part."""
        self.lost = reason

    def optim_step(self, params: AdamParams) -> None:
        """Update the weights from the gathered gradient.

        Raises:
            RequestError: a forward_backward since the last step failed, or a bad parameter.
        """
        reason, self.lost = self.lost, None
        if reason is not None:
            self._optimizer.clear_gradient()
            raise RequestError(
                f"A forward_backward of this batch failed ({reason}), so its gradient was dropped and no step "
                "was taken: send the whole batch again."
            )
        self._optimizer.step(params)

    def weights(self) -> dict[str, Tensor]:
        """The adapter's tensors by peft's names; they are the live ones, not copies."""
        return adapter_tensors(self.adapter)

    def optimizer_state(self) -> dict[str, Tensor]:
        return self._optimizer.state()

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        """Take over a checkpoint: weights, and moments; without moments the optimizer starts anew."""
        copy_weights(weights, self.adapter)
        self._optimizer = Optimizer(self.adapter)
        if optimizer is not None:
            self._optimizer.load(optimizer)
        self.lost = None

    @property
    def is_settled(self) -> bool:
        """Whether weights and moments are all there is: no gradient is gathered, none was lost."""
        return self.lost is None and all(p.grad is None for _, p in self.adapter.named_parameters())

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, the moments and the gradient."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All that `restore` needs: ``weights/``, ``optimizer/`` and ``gradient/`` by name."""
        parameters = dict(self.adapter.named_parameters())
        return {
            **{f"weights/{name}": tensor for name, tensor in self.weights().items()},
            **{f"optimizer/{name}": tensor for name, tensor in self.optimizer_state().items()},
            **{f"gradient/{name}": p.grad for name, p in parameters.items() if p.grad is not None},
        }

    def restore(self, tensors: Mapping[str, Tensor], lost: str | None) -> None:
        """Be what the trainer was whose `tensors` and `lost` these are, bit for bit."""
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}, "gradient": {}}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            groups[group][name] = tensor
        self.load(groups["weights"], groups["optimizer"])
        for name, parameter in self.adapter.named_parameters():
            if name in groups["gradient"]:
                parameter.grad = groups["gradient"][name].to(parameter.device)
        self.lost = lost

    def snapshot(self) -> Adapter:
        """The adapter as it is now, for sampling: later steps do not change it."""
        return Adapter(
            self.adapter.spec,
            {
                name: Factors(factors.a.detach().clone(), factors.b.detach().clone())
                for name, factors in self.adapter.factors.items()
            },
        )


def adapter_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """An adapter's tensors by peft's names; they are the live ones, not copies."""
    return {f"{_PEFT_PREFIX}{name}": parameter.detach() for name, parameter in adapter.named_parameters()}


def copy_weights(weights: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Copy a checkpoint's tensors into ``adapter``.

    Raises:
        EngineError: they are not the adapter's, name by name and shape by shape.
    """
    parameters = {f"{_PEFT_PREFIX}{name}": parameter for name, parameter in adapter.named_parameters()}
    if {k: v.shape for k, v in parameters.items()} != {k: v.shape for k, v in weights.items()}:
        raise EngineError(
            "The checkpoint's tensors do not fit this base model: load it onto the model it was trained on."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            parameter.grad = None

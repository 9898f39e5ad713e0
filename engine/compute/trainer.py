"""One adapter in training, with its optimizer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from tinker.types import AdamParams
from torch import Tensor

from engine.compute.base import HEAD, BaseModel
from engine.compute.datum import Datum, check_datum
from engine.compute.lora import Adapter, Factors, LoraSpec
from engine.compute.loss import Loss
from engine.compute.optimizer import Optimizer
from engine.compute.train import LossOutput, iterate_loss
from engine.errors import EngineError, RequestError

_PEFT_PREFIX = "base_model.model."

# In a mixture of experts, peft treats layers of these names as experts or routers, except in `qwen2_moe`.
_EXPERT_LAYERS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


class Trainer:
    """Mutable training state of one adapter. Only the compute thread uses it.

    After a failed forward_backward, the caller calls `invalidate_gradient`, so that the next optimizer step also fails
    and drops the whole gradient. Otherwise, a client that sends both requests without waiting would unknowingly take a
    step on part of a batch.

    Attributes:
        micro_batch_tokens: maximum size of one forward pass in tokens, including padding; a longer sequence has a pass
            of its own.
        gradient_error: reason why the accumulated gradient is incomplete; None if it is complete.
    """

    def __init__(self, base: BaseModel, spec: LoraSpec, micro_batch_tokens: int) -> None:
        self.base = base
        self.adapter = base.new_adapter(spec)
        self._optimizer = Optimizer(self.adapter)
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_error: str | None = None

    def forward_backward(
        self, data_D: Sequence[Datum], loss: Loss, forward_only: bool
    ) -> Generator[None, None, LossOutput]:
        """Compute logprobs and loss of a batch, and accumulate its gradient unless ``forward_only``.

        The generator yields between micro-batches.

        Raises:
            RequestError: the batch is empty, a datum is invalid for the model or the loss, a custom loss fails or has
                no gradient, or the loss or its gradient is not finite.
        """
        if not data_D:
            raise RequestError("The batch is empty: send at least one datum.")
        for index, datum in enumerate(data_D):
            check_datum(datum, index, self.base.loaded.vocab_size, self.base.loaded.max_context)
        data_D = [loss.prepare(datum, index) for index, datum in enumerate(data_D)]
        generator = iterate_loss(
            self.base, self.adapter, data_D, loss, self.micro_batch_tokens, backward=not forward_only
        )
        return (yield from generator)

    def invalidate_gradient(self, reason: str) -> None:
        """Mark the accumulated gradient as incomplete."""
        self.gradient_error = reason

    def optim_step(self, params: AdamParams) -> float | None:
        """Update the weights from the accumulated gradient; return its norm before clipping, None without clipping.

        Raises:
            RequestError: a forward_backward since the last step failed, a parameter is invalid, or the gradient or its
                square is not finite. The weights are unchanged, and the gradient is dropped, except if a parameter is
                invalid.
        """
        reason, self.gradient_error = self.gradient_error, None
        if reason is not None:
            self._optimizer.clear_gradient()
            raise RequestError(
                f"A forward_backward of this batch failed ({reason}), so its gradient was dropped and no step "
                "was taken: send the whole batch again."
            )
        return self._optimizer.step(params)

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter's live tensors, keyed by their peft names."""
        return adapter_tensors(self.adapter)

    def external_weights(self) -> dict[str, Tensor]:
        """Return the adapter's live tensors by the names that peft loads: those of `weights`, but with the head's own.

        Raises:
            RequestError: the adapter has weights of dense layers that peft would load into the experts.
        """
        dense = [name for name in sorted(self.adapter.factors) if name.rpartition(".")[2] in _EXPERT_LAYERS]
        if dense and self.base.has_experts and self.base.loaded.model.config.model_type != "qwen2_moe":
            raise RequestError(
                f"The adapter has weights of the dense layer {dense[0]}, which peft would load into the experts: train "
                "with train_mlp=False to export it."
            )
        old, new = f"{_PEFT_PREFIX}{HEAD}.", f"{_PEFT_PREFIX}{self.base.head_name}."
        return {
            f"{new}{name.removeprefix(old)}" if name.startswith(old) else name: tensor
            for name, tensor in self.weights().items()
        }

    def optimizer_state(self) -> dict[str, Tensor]:
        return self._optimizer.state()

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        """Load a checkpoint's weights, and its optimizer state if given; otherwise reset the optimizer.

        Raises:
            EngineError: names or shapes of the weights differ from the adapter's.
        """
        copy_weights(weights, self.adapter)
        self._optimizer = Optimizer(self.adapter)
        if optimizer is not None:
            self._optimizer.load(optimizer)
        self.gradient_error = None

    @property
    def is_between_steps(self) -> bool:
        """True if no gradient has accumulated or been lost, so that weights and moments are the whole state."""
        return self.gradient_error is None and all(p.grad is None for _, p in self.adapter.named_parameters())

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, the moments and the gradient.

        Every request reads it, so it does not call `tensors`, which makes hundreds of views. Each view is an
        operation of torch that releases the interpreter's lock, and then may have to wait until the event loop
        releases it.
        """
        gradients = [p.grad for _, p in self.adapter.named_parameters() if p.grad is not None]
        return self.adapter.num_bytes + self._optimizer.num_bytes + sum(gradient.nbytes for gradient in gradients)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for `restore`, in tensors named ``weights/``, ``optimizer/`` and ``gradient/``."""
        parameters = dict(self.adapter.named_parameters())
        return {
            **{f"weights/{name}": tensor for name, tensor in self.weights().items()},
            **{f"optimizer/{name}": tensor for name, tensor in self.optimizer_state().items()},
            **{f"gradient/{name}": p.grad for name, p in parameters.items() if p.grad is not None},
        }

    def restore(self, tensors: Mapping[str, Tensor], gradient_error: str | None) -> None:
        """Restore the exact state of another trainer from its `tensors` and `gradient_error`."""
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}, "gradient": {}}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            groups[group][name] = tensor
        self.load(groups["weights"], groups["optimizer"])
        for name, parameter in self.adapter.named_parameters():
            if name in groups["gradient"]:
                parameter.grad = groups["gradient"][name].to(parameter.device)
        self.gradient_error = gradient_error

    def snapshot(self) -> Adapter:
        """Copy the current adapter for sampling."""
        return Adapter(
            self.adapter.spec,
            {
                name: Factors(factors.a.detach().clone(), factors.b.detach().clone())
                for name, factors in self.adapter.factors.items()
            },
        )


def adapter_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Return an adapter's live tensors, keyed by their peft names."""
    return {f"{_PEFT_PREFIX}{name}": parameter.detach() for name, parameter in adapter.named_parameters()}


def copy_weights(weights: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Copy a checkpoint's tensors into ``adapter``, and drop its gradient.

    Raises:
        EngineError: names or shapes differ.
    """
    parameters = {f"{_PEFT_PREFIX}{name}": parameter for name, parameter in adapter.named_parameters()}
    if {k: v.shape for k, v in parameters.items()} != {k: v.shape for k, v in weights.items()}:
        raise EngineError(
            "The names or shapes of the checkpoint's tensors do not match the adapter: load the checkpoint into the "
            "base model and LoRA configuration it was trained with."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            parameter.grad = None

"""Base model with adapters: hidden states, logprobs and logits under the active adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.compute.kv_cache import KVCache, register_cached_attention
from engine.compute.linear import keeps_bits
from engine.compute.lora import ActiveAdapters, Adapter, AdapterRows, LoraSpec, new_adapter, wrap_linears
from engine.compute.training_graphs import TrainingGraphs
from engine.models import LoadedModel, ModelError

HEAD = "lm_head"  # the head's name in adapters and checkpoints
_ROPE_BY_LENGTH = ("dynamic", "longrope")  # transformers recomputes their frequencies for longer sequences

# Above 20,000 elements (GELU) or 32,768 (others), torch splits an elementwise operation between threads. The last
# elements of each share are computed with scalar instructions, whose bits differ from vector ones for exp and tanh.
_UNSPLIT_ELEMENTS = 16_384
_VECTOR_ELEMENTS = 32
_ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation")  # attributes of the layers of transformers


class BaseModel:
    """Owner of a loaded model. Only the compute thread uses it.

    Attributes:
        loaded: the loaded model with its name, path, context length and vocabulary size.
        decoder: the model without its output head, with wrapped linear layers.
        head_name: the head's name in the model, such as `lm_head` or `embed_out`.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        head = loaded.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"{loaded.name} has no linear output head, which this engine requires: use another model.")
        register_cached_attention(loaded.model)
        self._head = head
        self._active = ActiveAdapters()
        self.decoder = loaded.model.get_decoder()
        names = {module: name for name, module in loaded.model.named_modules()}
        self.head_name = names[head]
        self._linears = wrap_linears(self.decoder, f"{names[self.decoder]}.", self._active)
        self._attn = {name: linear for name, linear in self._linears.items() if "attn" in name or "attention" in name}
        self._mlp = {name: linear for name, linear in self._linears.items() if name not in self._attn}
        _wrap_activations(self.decoder)
        self._graphs = TrainingGraphs(self._launch) if self._can_be_captured else None

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @property
    def num_parameters(self) -> int:
        return self.loaded.model.num_parameters()

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts, whose operations depend on values: a CUDA graph cannot contain them."""
        is_named = any(name.endswith("experts") for name, _ in self.loaded.model.named_modules())
        return is_named or any(weight.ndim == 3 for weight in self.decoder.parameters())

    @property
    def has_other_products(self) -> bool:
        """True if layers of other types than `nn.Linear`, such as experts, compute matrix products."""
        others = (module for module in self.decoder.modules() if not isinstance(module, nn.Embedding))
        matrices = (module for module in others if any(weight.ndim > 1 for weight in module.parameters(recurse=False)))
        return any(type(module) is not nn.Linear for module in matrices)

    @property
    def _can_be_captured(self) -> bool:
        """True on CUDA, if a training pass reads no values on the host and needs no attention mask or autocast."""
        window = getattr(self.loaded.model.config.get_text_config(), "sliding_window", None)
        is_excluded = self.has_experts or self.keys_depend_on_length or self.loaded.dtype == "autocast-bf16"
        return self.device.type == "cuda" and window is None and not is_excluded

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.loaded.model.parameters())

    @property
    def bytes_per_trained_token(self) -> int:
        """Estimate of the memory that one token of a pass with gradients takes, by the model's configuration."""
        config = self.loaded.model.config.get_text_config()
        size = self.loaded.model.dtype.itemsize
        # Each layer keeps the inputs of its seven products and of the activation, the rotated heads, and both norms in
        # float32; the head keeps the logits, and the softmax and its gradient in float32.
        per_layer = size * (10 * config.hidden_size + 6 * config.intermediate_size) + 4 * 4 * config.hidden_size
        return config.num_hidden_layers * per_layer + (size + 8) * self.loaded.vocab_size

    @property
    def keys_depend_on_length(self) -> bool:
        """True if the keys of a token depend on the length of its sequence, because the position encoding does."""
        parameters = getattr(self.loaded.model.config.get_text_config(), "rope_parameters", None) or {}
        per_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
        return any(kind.get("rope_type") in _ROPE_BY_LENGTH for kind in (parameters, *per_layer_type))

    @property
    def options_without_layers(self) -> list[str]:
        """Options of a `LoraSpec` that have no effect on this model."""
        return [option for option, layers in (("train_attn", self._attn), ("train_mlp", self._mlp)) if not layers]

    def keeps_bits(self) -> bool:
        """Return True if this machine gives a row the same bits in any batch of two or more rows."""
        layers = (*self._linears.values(), self._head)
        return all(keeps_bits(weight) for weight in {layer.weight.shape: layer.weight for layer in layers}.values())

    def new_adapter(self, spec: LoraSpec) -> Adapter:
        """Create an untrained adapter for this model; see `lora.new_adapter`."""
        return new_adapter(spec, self._attn, self._mlp, {HEAD: self._head})

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Run the block under ``adapter``; None is the base model itself."""
        with self.using_rows([] if adapter is None else [AdapterRows(adapter, None)]):
            yield

    @contextmanager
    def using_rows(self, assignments: Sequence[AdapterRows]) -> Iterator[None]:
        """Run the block with one adapter for each set of rows (of dimension 0).

        An adapter gets gradients only if it is the only one, for all rows.
        """
        with self._active.activate(assignments), self.loaded.autocast():
            yield

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Compute the last hidden states ``(B, T, H)`` of right-padded token ids."""
        return self.decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state

    def trained_hidden(self, adapter: Adapter, tokens_BT: Tensor) -> Tensor:
        """Compute `hidden` under the active ``adapter``, on a GPU by a captured pass if the model allows it."""
        names = [name for name in sorted(adapter.factors) if name != HEAD]
        if self._graphs is None or not names:
            return self.hidden(tokens_BT)
        return self._graphs.hidden(adapter, names, tokens_BT)

    def _launch(self, adapter: Adapter, tokens_BT: Tensor) -> Tensor:
        # transformers reads values back to choose a mask, unless it is given one. The attention ignores this one.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        with self.using(adapter):
            return self.decoder(
                input_ids=tokens_BT, attention_mask=mask, use_cache=False, ignores_mask=True
            ).last_hidden_state

    def hidden_with_cache(self, tokens_RT: Tensor, positions_RT: Tensor, mask: Tensor, kv_cache: KVCache) -> Tensor:
        """Compute the last hidden states ``(R, T, H)`` of new tokens, whose slots are selected in ``kv_cache``.

        The cache stores their keys and values.
        """
        return self.decoder(
            input_ids=tokens_RT,
            attention_mask=mask,
            position_ids=positions_RT,
            past_key_values=kv_cache,
            use_cache=True,
            kv_cache=kv_cache,
        ).last_hidden_state

    @property
    def head(self) -> nn.Linear:
        return self._head

    def head_lora(self) -> tuple[Adapter, str] | None:
        """Return the active adapter and the head's name in it, or None if no active adapter adapts the head."""
        for adapter, _ in self._active.assignments:
            if HEAD in adapter.factors:
                return (adapter, HEAD)
        return None

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Compute the logits ``(R, V)`` over the vocabulary, for sampling, and return them as float32."""
        # Without autocast, which would round the logits of float32 weights to three digits.
        with torch.autocast(self.device.type, enabled=False):
            return self._active.apply(self._head, HEAD, hidden_RH).float()


class RowwiseActivation(nn.Module):
    """Activation that, on a CPU and without gradients, gives a row the same bits in any batch."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.device.type != "cpu":
            return self.activation(x)
        width = x.shape[-1]
        rows_per_call = max(1, _UNSPLIT_ELEMENTS // width) if width % _VECTOR_ELEMENTS == 0 else 1
        parts = [self.activation(part) for part in x.reshape(-1, width).split(rows_per_call)]
        return torch.cat(parts).view(x.shape) if len(parts) > 1 else parts[0].view(x.shape)


def _wrap_activations(decoder: nn.Module) -> None:
    """Replace the activations of a decoder by row-wise ones."""
    for module in list(decoder.modules()):
        for name in _ACTIVATIONS:
            activation = getattr(module, name, None)
            if isinstance(activation, nn.Module):
                setattr(module, name, RowwiseActivation(activation))

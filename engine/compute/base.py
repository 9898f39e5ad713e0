"""A base model with room for adapters: hidden states, logprobs and logits under one adapter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.compute.lora import Adapter, LoraSpec, Share, Slot, new_adapter, wrap_linears
from engine.compute.slots import attend_slots
from engine.models import LoadedModel, ModelError

HEAD = "lm_head"


class BaseModel:
    """Owns the loaded model; only the compute thread calls it.

    Attributes:
        loaded: the model as it was loaded, with its name, path, context and vocabulary.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        head = loaded.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"{loaded.name} has no linear output head, which this engine needs: use another model.")
        _refuse_rescaled_logits(loaded)
        attend_slots(loaded.model)
        self._head = head
        self._slot = Slot()
        self.decoder = loaded.model.get_decoder()
        prefix = next(name for name, module in loaded.model.named_modules() if module is self.decoder)
        self._linears = wrap_linears(self.decoder, f"{prefix}.", self._slot)

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    def new_adapter(self, spec: LoraSpec) -> Adapter:
        """A fresh adapter of this model; see `lora.new_adapter`."""
        attn = {name: linear for name, linear in self._linears.items() if "attn" in name or "attention" in name}
        mlp = {name: linear for name, linear in self._linears.items() if name not in attn}
        return new_adapter(spec, attn, mlp, {HEAD: self._head})

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Run what is inside under ``adapter``; None is the base model itself."""
        with self.sharing([] if adapter is None else [Share(adapter, None)]):
            yield

    @contextmanager
    def sharing(self, shares: Sequence[Share]) -> Iterator[None]:
        """Run what is inside with each share's rows, by the first dimension, under its adapter; no gradients."""
        with self._slot.holding(shares), self.loaded.autocast():
            yield

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Last hidden states ``(B, T, H)`` of right-padded token ids."""
        return self.decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state

    @property
    def head(self) -> nn.Linear:
        return self._head

    def head_lora(self) -> tuple[Adapter, str] | None:
        """The adapter in use and the head's name in it, where it adapts the head."""
        for adapter, _ in self._slot.shares:
            if HEAD in adapter.factors:
                return (adapter, HEAD)
        return None

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The logits ``(R, V)`` in float32: for sampling, where all of them are needed."""
        # In the dtype of the hidden states: autocast would round them to three digits.
        with torch.autocast(self.device.type, enabled=False):
            return self._slot.add_to(self._head(hidden_RH), hidden_RH, HEAD).float()


def _refuse_rescaled_logits(loaded: LoadedModel) -> None:
    """The engine computes logits as one matrix product; one that does more to them would train wrongly."""
    config = loaded.model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ModelError(
                f"{loaded.name} rescales its logits ({name} = {getattr(config, name)}), which this engine does "
                "not do: use another model."
            )

"""The keys and values of all rows in generation, and the attention that reads them.

Each row has a slot of its own and fills it from the left: position and index in the slot are the same, whenever the
row came. Room is made ahead, so that a step writes one token per row and layer and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "slots"
STEP = 128  # tokens by which slots grow


def rounded_up(num_tokens: int) -> int:
    """To where slots grow next.

    >>> rounded_up(128), rounded_up(129)
    (128, 256)
    """
    return -(-num_tokens // STEP) * STEP


class Slots(Cache):
    """Keys and values per layer, ``(rows, heads, tokens, width)``; the first `num_rows` rows are in use."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths_R = torch.empty(0, dtype=torch.int64)
        self._masks: dict[int | None, Tensor] = {}
        self._index_R = self._lengths_R
        self._copies = False

    @property
    def num_rows(self) -> int:
        return len(self._lengths_R)

    def add(self, prefill: DynamicCache, rows_N: Sequence[int], lengths_N: Sequence[int]) -> None:
        """Append ``N`` rows: row ``rows_N[n]`` of a right-padded prefill, of which ``lengths_N[n]`` tokens are real."""
        first, count = self.num_rows, len(rows_N)
        self._lengths_R = torch.cat([self._lengths_R, torch.tensor(lengths_N)])
        per_layer: list[Any] = prefill.layers
        layers: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in per_layer]
        if not self._keys:
            self._keys = [keys.new_empty(0, keys.shape[1], 0, keys.shape[3]) for keys, _ in layers]
            self._values = [values.new_empty(0, values.shape[1], 0, values.shape[3]) for _, values in layers]
        self._make_room()
        index_N = torch.tensor(rows_N, device=layers[0][0].device)
        length = max(lengths_N)
        for layer, (keys, values) in enumerate(layers):
            self._keys[layer][first : first + count, :, :length] = keys[index_N, :, :length]
            self._values[layer][first : first + count, :, :length] = values[index_N, :, :length]

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Free ``rows``; the last rows move into the gaps. Returns the former index of each row that is left."""
        left = list(range(self.num_rows))
        for gap in sorted(rows, reverse=True):
            left[gap] = left[-1]
            left.pop()
        moved = [(new, old) for new, old in enumerate(left) if new != old]
        if moved:
            new_M, old_M = (list(side) for side in zip(*moved, strict=True))
            for buffer in (*self._keys, *self._values):
                buffer[new_M] = buffer[old_M]
        self._lengths_R = self._lengths_R[left]
        if not left:
            self._keys, self._values = [], []
        return left

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        self._lengths_R = self._lengths_R + 1
        self._make_room()

    def turn_to(self, rows_R: Tensor, width: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Let the next pass be over some rows; the positions ``(R, 1)`` of their new tokens, and its mask.

        Args:
            rows_R: int64, one of them more than once where the pass has room; all rows, in their order, cost no copy.
            width: how many tokens of each slot are looked at; None for as many as the longest row has.
        """
        self._index_R = rows_R.to(device)
        self._positions_R = (self._lengths_R[rows_R] - 1).to(device)
        self._width = width or int(self._lengths_R.max())
        self._copies = width is not None
        self._masks = {}
        return self._positions_R[:, None], self.mask(None)

    def mask(self, window: int | None) -> Tensor:
        """What each row's new token sees, ``(R, 1, 1, T)``: all tokens up to itself, or the last ``window`` of them."""
        if window not in self._masks:
            distance_RT = self._positions_R[:, None] - torch.arange(self._width, device=self._positions_R.device)
            seen_RT = distance_RT >= 0
            if window is not None:
                seen_RT &= distance_RT < window
            self._masks[window] = seen_RT[:, None, None]
        return self._masks[window]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer of the model with its new keys and values ``(R, heads, 1, width)``."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._index_R, :, self._positions_R] = key_states[:, :, 0].to(keys.dtype)
        values[self._index_R, :, self._positions_R] = value_states[:, :, 0].to(values.dtype)
        rows = self._index_R if self._copies else slice(self.num_rows)
        return keys[rows, :, : self._width], values[rows, :, : self._width]

    def _make_room(self) -> None:
        rows, tokens = self.num_rows, int(self._lengths_R.max())
        held_rows, _, held_tokens, _ = self._keys[0].shape
        if rows <= held_rows and tokens <= held_tokens:
            return
        tokens = rounded_up(tokens)
        kept_rows, kept_tokens = min(rows, held_rows), min(tokens, held_tokens)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                grown = old.new_zeros(rows, old.shape[1], tokens, old.shape[3])
                grown[:kept_rows, :, :kept_tokens] = old[:kept_rows, :, :kept_tokens]
                buffers[layer] = grown


def attend_slots(model: PreTrainedModel) -> None:
    """Let ``model`` use the attention below; without slots it computes what "sdpa" does."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    slots: Slots | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A step's query of each row, ``(R, heads, 1, width)``, over the row's slot.

    Query heads that share keys and values attend as if they were tokens of one head, so that nothing is repeated.
    """
    if slots is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    num_rows, num_heads, _, width = query.shape
    shared = num_heads // key.shape[1]
    mixed = nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, -1, shared, width),
        key,
        value,
        attn_mask=slots.mask(kwargs.get("sliding_window")),
        scale=kwargs.get("scaling"),
    )
    return mixed.reshape(num_rows, 1, num_heads, -1), None

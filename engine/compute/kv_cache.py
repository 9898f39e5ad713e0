"""Key-value cache of all rows in generation, and the attention that reads it.

Each row has its own buffer, filled from the left, so a token's position is its index in the buffer. Buffers grow
ahead of time: a decoding step writes one token per row and layer, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel

from engine.transformers_internals import AttentionMaskInterface, sdpa_attention_forward, sdpa_mask

ATTENTION = "kv_cache"
GROWTH = 128  # tokens by which buffers grow


def round_up(num_tokens: int) -> int:
    """Round up to the next buffer size.

    >>> round_up(128), round_up(129)
    (128, 256)
    """
    return -(-num_tokens // GROWTH) * GROWTH


class KVCache(Cache):
    """Keys and values per layer, ``(rows, heads, tokens, width)``; only the first `num_rows` rows are in use."""

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
        """Append ``N`` rows: row ``rows_N[n]`` of a right-padded prefill, with ``lengths_N[n]`` real tokens."""
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
        """Drop ``rows`` and move the last rows into the gaps; return the former index of each remaining row.

        The freed slots are cleared: a masked position has the weight 0, but 0 times NaN would reach the next row.
        """
        length = int(self._lengths_R.max())
        remaining = list(range(self.num_rows))
        for gap in sorted(rows, reverse=True):
            remaining[gap] = remaining[-1]
            remaining.pop()
        moved = [(new, old) for new, old in enumerate(remaining) if new != old]
        if moved:
            new_M, old_M = (list(side) for side in zip(*moved, strict=True))
            for buffer in (*self._keys, *self._values):
                buffer[new_M] = buffer[old_M]
        for buffer in (*self._keys, *self._values):
            buffer[len(remaining) : self.num_rows, :, :length] = 0
        self._lengths_R = self._lengths_R[remaining]
        if not remaining:
            self._keys, self._values = [], []
        return remaining

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        self._lengths_R = self._lengths_R + 1
        self._make_room()

    def select_rows(self, rows_R: Tensor, width: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Select the rows of the next forward pass.

        Args:
            rows_R: int64 row indices; repeated indices are padding. All rows in order need no copy.
            width: number of tokens of each buffer to attend to; None is the length of the longest row.

        Returns:
            Positions ``(R, 1)`` of the new tokens, and the attention mask of the pass.
        """
        self._index_R = rows_R.to(device)
        self._positions_R = (self._lengths_R[rows_R] - 1).to(device)
        self._width = width or int(self._lengths_R.max())
        self._copies = not torch.equal(rows_R, torch.arange(self.num_rows))
        self._masks = {}
        return self._positions_R[:, None], self.mask(None)

    def mask(self, window: int | None) -> Tensor:
        """Mask ``(R, 1, 1, T)`` of each row's new token: all tokens up to itself, or the last ``window`` of them."""
        if window not in self._masks:
            distance_RT = self._positions_R[:, None] - torch.arange(self._width, device=self._positions_R.device)
            visible_RT = distance_RT >= 0
            if window is not None:
                visible_RT &= distance_RT < window
            self._masks[window] = visible_RT[:, None, None]
        return self._masks[window]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values ``(R, heads, 1, width)``; return all that its attention reads."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._index_R, :, self._positions_R] = key_states[:, :, 0].to(keys.dtype)
        values[self._index_R, :, self._positions_R] = value_states[:, :, 0].to(values.dtype)
        rows = self._index_R if self._copies else slice(self.num_rows)
        return keys[rows, :, : self._width], values[rows, :, : self._width]

    def _make_room(self) -> None:
        rows, tokens = self.num_rows, int(self._lengths_R.max())
        old_rows, _, old_tokens, _ = self._keys[0].shape
        if rows <= old_rows and tokens <= old_tokens:
            return
        tokens = round_up(tokens)
        copied_rows, copied_tokens = min(rows, old_rows), min(tokens, old_tokens)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                grown = old.new_zeros(rows, old.shape[1], tokens, old.shape[3])
                grown[:copied_rows, :, :copied_tokens] = old[:copied_rows, :, :copied_tokens]
                buffers[layer] = grown


def register_cached_attention(model: PreTrainedModel) -> None:
    """Install the attention below in ``model``; calls without a cache behave as with "sdpa"."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kv_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each row's new token, ``(R, heads, 1, width)``, to the row's cached tokens.

    Query heads that share keys and values are treated as tokens of one head, so keys and values are not repeated.
    """
    if kv_cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    num_rows, num_heads, _, width = query.shape
    query = query.reshape(num_rows, key.shape[1], -1, width)
    mask = kv_cache.mask(kwargs.get("sliding_window"))
    scale = kwargs.get("scaling") or width**-0.5
    if query.dtype == torch.float32:
        # The flash kernel works in one buffer per thread, whose alignment decides the last bits, so they depend on the
        # number of rows. Those of one product per row and head do not; for a single token it is as fast.
        scores = (query * scale) @ key.transpose(2, 3)
        mixed = scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1) @ value
    else:
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return mixed.reshape(num_rows, 1, num_heads, -1), None

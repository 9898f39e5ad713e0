"""Key-value cache of all rows in generation, and the attention that reads it.

Each row has its own buffer, filled from the left, so a token's position is its index in the buffer. Buffers grow
ahead of time: a decoding step writes one token per row and layer, and copies nothing. On a GPU they also grow by many
rows at once, because decoding steps are captured for fixed buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


class KVCache(Cache):
    """Keys and values per layer, ``(rows, heads, tokens, width)``; only the first `num_rows` rows are in use.

    A forward pass computes the new tokens that were selected last: one per row (`select_rows`, `select_slots`), or, for
    new rows, all of their tokens that are not in the cache yet (`select_new_tokens`).

    Attributes:
        num_allocations: how often the buffers were replaced.
    """

    def __init__(self, max_tokens: int, slots_per_growth: int = 1) -> None:
        """Create an empty cache.

        Args:
            max_tokens: limit on the capacity, in tokens, that spare rows may fill. Rows in use may exceed the limit;
                buffers then have no spare rows.
            slots_per_growth: number of rows by which buffers grow.
        """
        super().__init__(layers=[])
        self._max_tokens = max_tokens
        self._slots_per_growth = slots_per_growth
        self.num_allocations = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths_R = torch.empty(0, dtype=torch.int64)
        # The selected forward pass.
        self._masks: dict[int | None, Tensor] = {}  # by attention window
        self._read_rows: Tensor | slice = slice(0)  # rows of the buffers that attention reads
        self._width = 0  # tokens of each row that attention reads
        self._positions_RT = self._lengths_R[:, None]  # positions of the new tokens
        self._real_N: Tensor | None = None  # flat indices of the new tokens that are not padding; None without padding
        self._written_rows_N = self._lengths_R  # buffer row of each new token
        self._written_positions_N = self._lengths_R  # buffer position of each new token

    @property
    def num_rows(self) -> int:
        return len(self._lengths_R)

    @property
    def num_slots(self) -> int:
        """Number of rows for which the buffers have memory."""
        return self._keys[0].shape[0] if self._keys else 0

    @property
    def capacity(self) -> int:
        """Number of tokens for which the buffers have memory."""
        return self.num_slots * self._keys[0].shape[2] if self._keys else 0

    @property
    def last_positions_R(self) -> Tensor:
        """Position of the last token of each row, int64 on the CPU."""
        return self._lengths_R - 1

    @property
    def per_layer(self) -> Layers:
        return list(zip(self._keys, self._values, strict=True))

    def add(self, layers: Layers, rows_N: Sequence[int], lengths_N: Sequence[int]) -> None:
        """Append ``N`` rows: row ``rows_N[n]`` of a right-padded prefill, with ``lengths_N[n]`` real tokens."""
        first, count = self.num_rows, len(rows_N)
        self._append(layers, lengths_N)
        index_N = torch.tensor(rows_N, device=layers[0][0].device)
        length = max(lengths_N)
        for layer, (keys, values) in enumerate(layers):
            self._keys[layer][first : first + count, :, :length] = keys[index_N, :, :length]
            self._values[layer][first : first + count, :, :length] = values[index_N, :, :length]

    def add_prefixes(self, prefixes_N: Iterable[Layers], lengths_N: Sequence[int]) -> None:
        """Append ``N`` rows with room for ``lengths_N[n]`` tokens, and fill the start of each row with its prefix.

        Args:
            prefixes_N: each prefix, as keys and values ``(blocks, heads, block size, width)`` of consecutive blocks;
                read one by one to save memory.
        """
        first = self.num_rows
        for row, prefix in enumerate(prefixes_N, first):
            if row == first:
                self._append(prefix, lengths_N)
            for layer, (keys, values) in enumerate(prefix):
                _copy_blocks(keys, self._keys[layer][row])
                _copy_blocks(values, self._values[layer][row])

    def repeat(self, first: int, rows_N: Sequence[int]) -> None:
        """Replace the rows from ``first`` on by copies of rows ``first + rows_N[n]``."""
        old_end = self.num_rows
        length = int(self._lengths_R.max())
        index_N = torch.tensor(rows_N, dtype=torch.int64) + first
        self._lengths_R = torch.cat([self._lengths_R[:first], self._lengths_R[index_N]])
        end = self.num_rows
        if end:
            self._make_room()
        if rows_N != list(range(old_end - first)):
            index_N = index_N.to(self._keys[0].device)
            for buffer in (*self._keys, *self._values):
                buffer[first:end, :, :length] = buffer[index_N, :, :length]
        self._clear(end, old_end, length)

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Drop ``rows`` and move the last rows into the gaps; return the former index of each remaining row."""
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
        old_end = self.num_rows
        self._lengths_R = self._lengths_R[remaining]
        self._clear(len(remaining), old_end, length)
        return remaining

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        self._lengths_R = self._lengths_R + 1
        self._make_room()

    def select_rows(self, rows_R: Tensor, width: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Select the last token of each row for the next forward pass.

        Args:
            rows_R: int64 row indices; repeated indices are padding. If these are all rows in order, attention reads the
                buffers instead of a copy.
            width: number of tokens of each buffer to attend to; None is the length of the longest row.

        Returns:
            Positions ``(R, 1)`` of the new tokens, and the attention mask of the pass.
        """
        self._written_rows_N = rows_R.to(device)
        self._written_positions_N = (self._lengths_R[rows_R] - 1).to(device)
        self._positions_RT = self._written_positions_N[:, None]
        self._real_N = None
        self._width = width or int(self._lengths_R.max())
        is_all = torch.equal(rows_R, torch.arange(self.num_rows))
        self._read_rows = slice(self.num_rows) if is_all else self._written_rows_N
        self._masks = {}
        return self._positions_RT, self.mask(None)

    def select_slots(self, positions_S: Tensor) -> tuple[Tensor, Tensor]:
        """Select the token at ``positions_S[s]`` of the first ``S`` slots, whether or not a row uses them.

        The attention is as wide as the buffers, and nothing depends on values on the host, so the pass can be captured
        as a CUDA graph and repeated with other positions in the same tensor.

        Returns:
            Positions ``(S, 1)`` of the new tokens, and the attention mask of the pass.
        """
        self._written_rows_N = torch.arange(len(positions_S), device=positions_S.device)
        self._written_positions_N = positions_S
        self._positions_RT = positions_S[:, None]
        self._real_N = None
        self._width = self._keys[0].shape[2]
        self._read_rows = slice(len(positions_S))
        self._masks = {}
        return self._positions_RT, self.mask(None)

    def select_new_tokens(self, first: int, starts_R: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Select the tokens of row ``first + r`` from position ``starts_R[r]`` on for the next pass, right-padded.

        Returns:
            Positions ``(R, T)`` of the new tokens, and the attention mask of the pass.
        """
        lengths_R = self._lengths_R[first:]
        counts_R = lengths_R - torch.tensor(starts_R)
        offsets_T = torch.arange(int(counts_R.max()))
        real_RT = offsets_T < counts_R[:, None]
        # Padding has the position of the last token, and is not written.
        positions_RT = torch.minimum(torch.tensor(starts_R)[:, None] + offsets_T, lengths_R[:, None] - 1)
        rows_RT = torch.arange(first, self.num_rows)[:, None].expand_as(real_RT)
        self._written_rows_N = rows_RT[real_RT].to(device)
        self._written_positions_N = positions_RT[real_RT].to(device)
        self._positions_RT = positions_RT.to(device)
        self._real_N = real_RT.flatten().nonzero()[:, 0].to(device)
        self._width = int(lengths_R.max())
        self._read_rows = slice(first, self.num_rows)
        self._masks = {}
        return self._positions_RT, self.mask(None)

    def mask(self, window: int | None) -> Tensor:
        """Mask ``(R, 1, T, width)`` of the new tokens: all tokens up to themselves, or the last ``window`` of them."""
        if window not in self._masks:
            device = self._positions_RT.device
            distance_RTW = self._positions_RT[:, :, None] - torch.arange(self._width, device=device)
            visible_RTW = distance_RTW >= 0
            if window is not None:
                visible_RTW &= distance_RTW < window
            self._masks[window] = visible_RTW[:, None]
        return self._masks[window]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values ``(R, heads, T, width)``; return all that its attention reads."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        for buffer, new in ((keys, key_states), (values, value_states)):
            new_NHW = new[:, :, 0] if self._real_N is None else new.transpose(1, 2).flatten(0, 1)[self._real_N]
            buffer[self._written_rows_N, :, self._written_positions_N] = new_NHW.to(buffer.dtype)
        return keys[self._read_rows, :, : self._width], values[self._read_rows, :, : self._width]

    def _append(self, layers: Layers, lengths_N: Sequence[int]) -> None:
        """Make room for new rows with the heads and widths of ``layers``."""
        self._lengths_R = torch.cat([self._lengths_R, torch.tensor(lengths_N)])
        if not self._keys:
            self._keys = [keys.new_empty(0, keys.shape[1], 0, keys.shape[3]) for keys, _ in layers]
            self._values = [values.new_empty(0, values.shape[1], 0, values.shape[3]) for _, values in layers]
        self._make_room()

    def _clear(self, start: int, end: int, length: int) -> None:
        """Clear the freed slots from ``start`` to ``end``, or free the buffers if no row is left.

        A masked position has the weight 0, but a NaN there, times 0, would reach the row that uses the slot next.
        """
        for buffer in (*self._keys, *self._values):
            buffer[start:end, :, :length] = 0
        if not self.num_rows:
            self._keys, self._values = [], []
            self.num_allocations += 1

    def _make_room(self) -> None:
        """Replace the buffers if the rows or their tokens do not fit.

        The new buffers fit the present rows and lengths: they may have fewer rows or fewer tokens per row than before.
        """
        rows, tokens = self.num_rows, int(self._lengths_R.max())
        old_rows, _, old_tokens, _ = self._keys[0].shape
        if rows <= old_rows and tokens <= old_tokens:
            return
        tokens = round_up(tokens)
        rounded_rows = -(-rows // self._slots_per_growth) * self._slots_per_growth
        rows = max(rows, min(rounded_rows, self._max_tokens // tokens))
        self.num_allocations += 1
        copied_rows, copied_tokens = min(rows, old_rows), min(tokens, old_tokens)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                grown = old.new_zeros(rows, old.shape[1], tokens, old.shape[3])
                grown[:copied_rows, :, :copied_tokens] = old[:copied_rows, :, :copied_tokens]
                buffers[layer] = grown


def layers_of(cache: DynamicCache) -> Layers:
    """Return the keys and values of a prefill, each ``(rows, heads, tokens, width)``."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def _copy_blocks(blocks_NHTW: Tensor, buffer_HSW: Tensor) -> None:
    """Copy consecutive blocks to the start of a slot."""
    num_blocks, _, size, _ = blocks_NHTW.shape
    buffer_HSW[:, : num_blocks * size].unflatten(1, (num_blocks, size)).copy_(blocks_NHTW.transpose(0, 1))


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
    """Attend from each row's new tokens, ``(R, heads, T, width)``, to the row's cached tokens.

    Without a cache, attend by ``attention_mask``, or from each token to all tokens before it if ``ignores_mask``.

    If each row has one new token, query heads that share keys and values are treated as tokens of one head, so keys and
    values are not repeated.
    """
    if kv_cache is None:
        mask = None if kwargs.pop("ignores_mask", False) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    num_rows, num_heads, num_new, width = query.shape
    mask = kv_cache.mask(kwargs.get("sliding_window"))
    if num_new > 1:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    query = query.reshape(num_rows, key.shape[1], -1, width)
    scale = kwargs.get("scaling") or width**-0.5
    if query.dtype == torch.float32:
        # The last bits of the flash kernel's result depend on the number of rows, because it works in buffers of
        # varying alignment. One product per row and head always gives the same bits, and is as fast for one token.
        scores = (query * scale) @ key.transpose(2, 3)
        mixed = scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1) @ value
    else:
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return mixed.reshape(num_rows, 1, num_heads, -1), None

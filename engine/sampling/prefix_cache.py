"""Cache of keys and values, so that prompts with an equal beginning compute it once.

A sequence is split into blocks of `BLOCK` tokens. The key of a block is a digest of its tokens and of all tokens before
it, so equal keys mean equal beginnings.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.compute.kv_cache import Layers
from engine.compute.lora import Adapter

BLOCK = 32  # tokens; longer blocks cost less to store, but leave more tokens of a prompt to compute


class _Block(NamedTuple):
    """Keys and values of one block in all layers, and the number of its last use, which grows with each use."""

    data_F: Tensor
    last_used: int


_Blocks = OrderedDict[bytes, _Block]  # the least recently used first


class PrefixCache:
    """Blocks of keys and values by adapter; None is the base model. Only the compute thread calls its methods.

    The weights of an adapter must not change while it has blocks; the weights of samplers never change. The cache has
    weak references to adapters: an adapter frees its blocks when it is freed, which may happen on any thread.
    """

    def __init__(self) -> None:
        self._of_base: _Blocks = OrderedDict()
        self._of_adapters: WeakKeyDictionary[Adapter, _Blocks] = WeakKeyDictionary()
        self._shapes: list[tuple[int, int]] = []  # heads and width of the keys, then of the values, of each layer
        self._clock = count()

    @property
    def num_tokens(self) -> int:
        return BLOCK * sum(len(blocks) for blocks in self._all())

    def find(self, adapter: Adapter | None, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a sequence with these keys are cached, counted from its start."""
        blocks = self._of_base if adapter is None else self._of_adapters.get(adapter, OrderedDict())
        return next((index for index, key in enumerate(keys) if key not in blocks), len(keys))

    def read(self, adapter: Adapter | None, keys: Sequence[bytes]) -> Layers:
        """Return each layer's keys and values ``(N, heads, BLOCK, width)`` of N cached blocks; empty if ``keys`` is."""
        if not keys:
            return []
        blocks = self._blocks(adapter)
        self._touch(blocks, keys)
        flat_NF = torch.stack([blocks[key].data_F for key in keys])
        parts = flat_NF.split([heads * BLOCK * width for heads, width in self._shapes], dim=1)
        shaped = [
            part.unflatten(1, (heads, BLOCK, width)) for part, (heads, width) in zip(parts, self._shapes, strict=True)
        ]
        return list(zip(shaped[::2], shaped[1::2], strict=True))

    def put(self, adapter: Adapter | None, keys: Sequence[bytes], layers: Layers, row: int) -> None:
        """Store the blocks of the sequence in row ``row`` of ``layers``, except those already cached.

        Args:
            layers: keys and values ``(rows, heads, tokens, width)`` of each layer.
        """
        if not keys:
            return
        blocks = self._blocks(adapter)
        first = self.find(adapter, keys)
        if first < len(keys):
            tensors = [tensor for layer in layers for tensor in layer]
            self._shapes = [(tensor.shape[1], tensor.shape[3]) for tensor in tensors]
            tokens = slice(first * BLOCK, len(keys) * BLOCK)
            parts = [tensor[row, :, tokens].unflatten(1, (-1, BLOCK)).transpose(0, 1).flatten(1) for tensor in tensors]
            for key, data_F in zip(keys[first:], torch.cat(parts, dim=1), strict=True):
                blocks[key] = _Block(data_F.clone(), 0)  # a view would keep all blocks in memory
        self._touch(blocks, keys)

    def shrink(self, max_tokens: int) -> None:
        """Remove the least recently used blocks until at most ``max_tokens`` tokens are left."""
        excess = -(-(self.num_tokens - max_tokens) // BLOCK)
        while excess > 0 and (filled := [blocks for blocks in self._all() if blocks]):
            min(filled, key=lambda blocks: next(iter(blocks.values())).last_used).popitem(last=False)
            excess -= 1

    def _touch(self, blocks: _Blocks, keys: Sequence[bytes]) -> None:
        """Mark the blocks of a sequence as used, the first one last: without it, the others are useless."""
        for key in reversed(keys):
            blocks[key] = blocks[key]._replace(last_used=next(self._clock))
            blocks.move_to_end(key)

    def _blocks(self, adapter: Adapter | None) -> _Blocks:
        if adapter is None:
            return self._of_base
        return self._of_adapters.setdefault(adapter, OrderedDict())

    def _all(self) -> Iterator[_Blocks]:
        yield self._of_base
        for reference in self._of_adapters.keyrefs():  # a list: adapters may be freed meanwhile
            if (adapter := reference()) is not None:
                yield self._of_adapters.get(adapter, OrderedDict())


def block_keys(tokens_T: Tensor) -> list[bytes]:
    """Return the keys of the complete blocks of a sequence of int64 tokens.

    >>> first, second = block_keys(torch.arange(70))
    >>> block_keys(torch.arange(40)) == [first]
    True
    """
    content = tokens_T.numpy().tobytes()
    size = BLOCK * tokens_T.itemsize
    keys = [b""]
    for end in range(size, len(content) + 1, size):
        keys.append(blake2b(keys[-1] + content[end - size : end], digest_size=16).digest())
    return keys[1:]


def num_shared(keys_S: Sequence[Sequence[bytes]]) -> list[int]:
    """Return how many blocks each of ``S`` sequences has in common with any other, counted from its start.

    >>> num_shared([[b"a", b"ab"], [b"a", b"ac"], [b"d"]])
    [1, 1, 0]
    """
    counts = Counter(key for keys in keys_S for key in keys)
    return [sum(counts[key] > 1 for key in keys) for keys in keys_S]

"""CUDA graphs of decoding steps. A step of a small model takes longer to launch, kernel by kernel, than to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compute.base import BaseModel
from engine.compute.kv_cache import KVCache
from engine.compute.lora import Adapter, AdapterRows, Factors

MAX_ADAPTERS = 8  # in one graph; each is computed for all rows
SLOTS_PER_GRAPH = 64  # on an H100, 64 rows of SmolLM2 take one to two times as long as a single row


@dataclass(slots=True)
class _Step:
    """Decoding step of the first ``S`` slots: its inputs at fixed addresses and, once captured, its logits.

    Attributes:
        masks_S: mask of the rows of each adapter; empty if all rows have the same adapter, or all have none.
    """

    adapters: Sequence[AdapterRows]
    masks_S: Mapping[Adapter, Tensor]
    tokens_S1: Tensor
    positions_S: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    logits_SV: Tensor | None = None


class DecodingGraphs:
    """Decoding steps of a batch, captured at their second use.

    There is a graph for each set of adapters and each multiple of `SLOTS_PER_GRAPH` rows, and one for a single row. All
    graphs are dropped when the buffers of keys and values are replaced, because a graph has their addresses.
    """

    def __init__(self, base: BaseModel, kv_cache: KVCache) -> None:
        self._base = base
        self._kv_cache = kv_cache
        self._steps: dict[tuple[int, frozenset[Adapter | None]], _Step] = {}
        self._num_allocations = kv_cache.num_allocations
        self._pool: Any = None

    def logits(self, tokens_R: Sequence[int], adapters_R: Sequence[Adapter | None]) -> Tensor:
        """Compute the logits ``(R, V)`` after the last token of each row; the next call overwrites them.

        A graph may have more rows than ``R``. Its other rows write to slots that no row uses, and the next row in such
        a slot overwrites these values.
        """
        if self._num_allocations != self._kv_cache.num_allocations:
            self.clear()
            self._num_allocations = self._kv_cache.num_allocations
        num_rows = len(tokens_R)
        rounded = -(-num_rows // SLOTS_PER_GRAPH) * SLOTS_PER_GRAPH
        num_slots = min(self._kv_cache.num_slots, rounded) if num_rows > 1 else 1
        key = (num_slots, frozenset(adapters_R))
        step = self._steps.get(key)
        is_new = step is None
        if step is None:
            step = self._steps[key] = self._new_step(num_slots, [*dict.fromkeys(adapters_R)])
        for adapter, mask_S in step.masks_S.items():
            mask_S.zero_()
            mask_S[:num_rows] = torch.tensor([float(other is adapter) for other in adapters_R]).to(mask_S.device)
        step.tokens_S1[:num_rows, 0] = torch.tensor(tokens_R).to(self._base.device)
        step.positions_S.zero_()
        step.positions_S[:num_rows] = self._kv_cache.last_positions_R.to(self._base.device)
        if is_new:  # libraries allocate workspaces at their first use; a graph must not contain these allocations
            return self._compute(step)[:num_rows]
        if step.graph is None:
            step.graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(step.graph, pool=self._pool, capture_error_mode="thread_local"):
                step.logits_SV = self._compute(step)
        step.graph.replay()
        assert step.logits_SV is not None
        return step.logits_SV[:num_rows]

    def clear(self) -> None:
        """Drop all graphs, and with them their adapters."""
        self._steps.clear()
        self._pool = None  # the memory pool of dropped graphs cannot be used again

    def _new_step(self, num_slots: int, adapters: Sequence[Adapter | None]) -> _Step:
        tokens_S = torch.zeros(num_slots, dtype=torch.int64, device=self._base.device)
        masks_S: dict[Adapter, Tensor] = {}
        if len(adapters) > 1:
            masks_S = {adapter: tokens_S.float() for adapter in adapters if adapter}
        assignments = [AdapterRows(self._cast(adapter), masks_S.get(adapter)) for adapter in adapters if adapter]
        return _Step(assignments, masks_S, tokens_S[:, None], torch.zeros_like(tokens_S))

    def _cast(self, adapter: Adapter) -> Adapter:
        """Return the adapter in the dtype of the model, so that no step has to cast it."""
        dtype = self._base.loaded.model.dtype
        factors = {name: Factors(a.to(dtype), b.to(dtype)) for name, (a, b) in adapter.factors.items()}
        return Adapter(adapter.spec, factors)

    def _compute(self, step: _Step) -> Tensor:
        with self._base.using_rows(step.adapters):
            positions_S1, mask = self._kv_cache.select_slots(step.positions_S)
            hidden_S1H = self._base.hidden_with_cache(step.tokens_S1, positions_S1, mask, self._kv_cache)
            return self._base.logits(hidden_S1H[:, 0])

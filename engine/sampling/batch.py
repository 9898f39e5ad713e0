"""Running batch: rows are added, grow by one token per step and are removed when they end.

Rows with different lengths and adapters share a decoding step, so the base model's weights are read once for all of
them. A row's tokens depend only on its own seed and logits. Other rows in the batch change at most the last bits of its
logits; a deterministic batch prevents even this (`engine.sampling.batch_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from engine.compute.base import BaseModel
from engine.compute.batches import micro_batches, pad_right
from engine.compute.kv_cache import GROWTH, KVCache, layers_of, round_up
from engine.compute.lora import Adapter
from engine.sampling.batch_groups import RowGroup, group_all, uniform_groups
from engine.sampling.choose import RowSamplingParams, choose_tokens
from engine.sampling.cuda_graphs import MAX_ADAPTERS, SLOTS_PER_GRAPH, DecodingGraphs
from engine.sampling.job import TopTokens
from engine.sampling.prefix_cache import BLOCK, PrefixCache, block_keys, num_shared
from engine.sampling.request import Row, ends_with_stop
from engine.sampling.score import first_needed_position, score_prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to prefill, and the rows that they belong to.

    Attributes:
        tokens_T: int64 prompt and tokens so far.
        keys: keys of the blocks to put into the prefix cache.
        first_needed: position of the first token whose hidden state is needed.
    """

    rows: Sequence[Row]
    tokens_T: Tensor
    keys: Sequence[bytes]
    first_needed: int

    @property
    def usable_keys(self) -> Sequence[bytes]:
        """Keys of the blocks whose hidden states are not needed, so that the prefix cache can replace them."""
        return self.keys[: self.first_needed // BLOCK]


class Batch:
    """All rows in generation on one base model. Only the compute thread changes it."""

    def __init__(self, base: BaseModel, cache_bytes: int, prefill_tokens: int, *, deterministic: bool = False) -> None:
        """Create an empty batch.

        Args:
            cache_bytes: memory for keys and values, which a single row may exceed. The prefix cache uses the part that
                the rows do not need.
            prefill_tokens: maximum size of a prefill in tokens, including padding; a single prompt may exceed it.
            deterministic: make a row's logits bitwise independent of the other rows.
        """
        self.base = base
        self.rows: list[Row] = []
        self._max_tokens = cache_bytes // bytes_per_token(base)
        self._prefill_tokens = 0 if deterministic else prefill_tokens  # 0: one prompt per prefill
        self._deterministic = deterministic
        has_graphs = base.device.type == "cuda" and not (deterministic or base.has_experts)
        self._kv_cache = KVCache(self._max_tokens, SLOTS_PER_GRAPH if has_graphs else 1)
        self._prefix_cache = PrefixCache()
        self._graphs = DecodingGraphs(base, self._kv_cache) if has_graphs else None
        # A prefill that continues cached tokens may give other bits, and rows of different lengths cannot share the
        # attention keys of a model whose keys depend on the length.
        self._caches_prefixes = not deterministic and not base.keys_depend_on_length
        self._params: RowSamplingParams | None = None
        self._group_of_all: RowGroup | None = None

    def has_room(self, new_rows: Sequence[Row]) -> bool:
        """Return True if the cache has room for more rows; a single row always fits."""
        rows = [*self.rows, *new_rows]
        # A deterministic batch reserves the maximum length, so it never evicts: a prefill of sampled tokens would
        # change their last bits.
        longest = max(row.max_tokens if self._deterministic else row.num_tokens for row in rows)
        return len(rows) == 1 or len(rows) * (longest + GROWTH) <= self._max_tokens

    def make_room(self) -> list[Row]:
        """Remove rows from the end until the next step fits, or one is left; return them, to be added again later."""
        evicted = []
        while len(self.rows) > 1:
            # Buffers grow in units of `GROWTH` tokens.
            num_tokens = round_up(max(row.num_tokens for row in self.rows) + 1)
            if len(self.rows) * num_tokens <= self._max_tokens:
                break
            evicted.append(self.rows[-1])
            self.remove(lambda row: row is evicted[-1])
        return evicted

    def num_new_tokens(self, row: Row) -> int:
        """Return how many tokens of a row a prefill would compute."""
        prompt = self._prompt([row])
        return row.num_tokens - BLOCK * self._prefix_cache.find(row.request.adapter, prompt.usable_keys)

    def add(self, rows: Sequence[Row]) -> int:
        """Prefill rows (prompt and tokens so far) and choose the next token of each row.

        Returns:
            Number of tokens computed, without padding: rows with equal `Row.prefill_key` share one prefill, and equal
            beginnings are computed once.
        """
        num_computed = 0
        for adapter in dict.fromkeys(row.request.adapter for row in rows):
            groups: dict[object, list[Row]] = {}
            for row in (row for row in rows if row.request.adapter is adapter):
                groups.setdefault(row.prefill_key, []).append(row)
            with self.base.using(adapter), torch.inference_mode():
                num_computed += self._add_prompts(adapter, [self._prompt(group) for group in groups.values()])
        self._shrink_prefix_cache()
        return num_computed

    def _add_prompts(self, adapter: Adapter | None, prompts: Sequence[Prompt]) -> int:
        """Prefill prompts without cached tokens, then continue the others; return the number of tokens computed."""
        num_computed = self._compute_shared(adapter, prompts)
        starts = [BLOCK * self._prefix_cache.find(adapter, prompt.usable_keys) for prompt in prompts]
        for continues in (False, True):
            candidates = [index for index, start in enumerate(starts) if (start > 0) == continues]
            lengths = [len(prompts[index].tokens_T) - starts[index] for index in candidates]
            num_computed += sum(lengths)
            for indices in micro_batches(lengths, self._prefill_tokens):
                selected = [candidates[index] for index in indices]
                if continues:
                    self._continue(adapter, [(prompts[index], starts[index]) for index in selected])
                else:
                    self._prefill(adapter, [prompts[index] for index in selected])
        return num_computed

    def _compute_shared(self, adapter: Adapter | None, prompts: Sequence[Prompt]) -> int:
        """Compute the beginnings that several prompts have in common, longest first, and cache them.

        Returns:
            Number of tokens computed.
        """
        num_computed = 0
        shared = num_shared([prompt.usable_keys for prompt in prompts])
        for num_blocks, prompt in sorted(zip(shared, prompts, strict=True), key=lambda pair: -pair[0]):
            keys = prompt.keys[:num_blocks]
            num_cached = self._prefix_cache.find(adapter, keys)
            if num_cached == num_blocks:
                continue
            cache = DynamicCache()
            for layer, blocks in enumerate(self._prefix_cache.read(adapter, keys[:num_cached])):
                keys_1HTW, values_1HTW = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in blocks)
                cache.update(keys_1HTW, values_1HTW, layer)
            tokens = slice(num_cached * BLOCK, num_blocks * BLOCK)
            positions_T = torch.arange(tokens.start, tokens.stop, device=self.base.device)
            self.base.decoder(
                input_ids=prompt.tokens_T[None, tokens].to(self.base.device),
                position_ids=positions_T[None],
                past_key_values=cache,
                use_cache=True,
            )
            self._prefix_cache.put(adapter, keys, layers_of(cache), 0)
            num_computed += len(positions_T)
        return num_computed

    def step(self) -> None:
        """Generate one token for every row, and remove the rows that end."""
        assert self._group_of_all is not None
        groups = list(uniform_groups(self.rows)) if self._deterministic else [self._group_of_all]
        with torch.inference_mode():
            self._kv_cache.begin_step()
            for group in groups:
                self._step_group(group)
            for index, row in enumerate(self.rows):
                if row.done and self._caches_prefixes:
                    keys = block_keys(row.context_T()[:-1])  # the last token is not in the cache of keys and values yet
                    self._prefix_cache.put(row.request.adapter, keys, self._kv_cache.per_layer, index)
        self.remove(lambda row: row.done)
        self._shrink_prefix_cache()

    def _step_group(self, group: RowGroup) -> None:
        """Choose the next token of each row of a group, with a CUDA graph if possible."""
        rows = [self.rows[index] for index in group.rows_G.tolist()]
        assert self._params is not None
        if self._graphs and len(group.adapters) <= MAX_ADAPTERS:
            tokens_R, adapters_R = zip(*((row.tokens[-1], row.request.adapter) for row in rows), strict=True)
            logits_RV = self._graphs.logits(tokens_R, adapters_R)
            self._choose(rows, logits_RV, slice(None), self._params)
            return
        with self.base.using_rows(group.adapters):
            positions_R1, mask = self._kv_cache.select_rows(group.rows_G, group.width, self.base.device)
            tokens_R1 = torch.tensor([[row.tokens[-1]] for row in rows], device=self.base.device)
            hidden_R1H = self.base.hidden_with_cache(tokens_R1, positions_R1, mask, self._kv_cache)
            real = slice(group.num_rows)
            logits_RV = self.base.logits(hidden_R1H[:, 0])
            self._choose(rows[real], logits_RV, real, self._params.select(group.rows_G[real]))

    def remove(self, predicate: Callable[[Row], bool]) -> None:
        """Remove the rows for which ``predicate`` is True."""
        removed = [index for index, row in enumerate(self.rows) if predicate(row)]
        if not removed:
            return
        with torch.inference_mode():
            self.rows = [self.rows[index] for index in self._kv_cache.drop(removed)]
        self._update_groups()

    def _prompt(self, rows: Sequence[Row]) -> Prompt:
        """Return the prompt of rows with equal `Row.prefill_key`."""
        tokens_T = rows[0].context_T()
        request = rows[0].request
        first_needed = first_needed_position(request.job) if request.prompt_scores is None else len(tokens_T) - 1
        # A prompt that is scored from its start is rarely the beginning of another one.
        caches = self._caches_prefixes and first_needed >= BLOCK
        return Prompt(rows, tokens_T, block_keys(tokens_T) if caches else [], first_needed)

    def _prefill(self, adapter: Adapter | None, prompts: Sequence[Prompt]) -> None:
        """Add the rows of prompts without cached tokens."""
        lengths = [len(prompt.tokens_T) for prompt in prompts]
        cache = DynamicCache()
        hidden_BTH = self.base.decoder(
            input_ids=pad_right([prompt.tokens_T for prompt in prompts])[0].to(self.base.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        layers = layers_of(cache)
        for index, prompt in enumerate(prompts):
            self._prefix_cache.put(adapter, prompt.keys, layers, index)
        if prompts_U := self._start(hidden_BTH, [0] * len(prompts), prompts):
            self._kv_cache.add(layers, prompts_U, [lengths[index] for index in prompts_U])
            self._update_groups()

    def _continue(self, adapter: Adapter | None, prompts: Sequence[tuple[Prompt, int]]) -> None:
        """Add the rows of prompts, each with the number of its leading tokens in the cache."""
        first = self._kv_cache.num_rows
        starts = [start for _, start in prompts]
        self._kv_cache.add_prefixes(
            (self._prefix_cache.read(adapter, prompt.keys[: start // BLOCK]) for prompt, start in prompts),
            [len(prompt.tokens_T) for prompt, _ in prompts],
        )
        positions_BT, mask = self._kv_cache.select_new_tokens(first, starts, self.base.device)
        new_tokens = [prompt.tokens_T[start:] for prompt, start in prompts]
        tokens_BT = pad_right(new_tokens)[0].to(self.base.device)
        hidden_BTH = self.base.hidden_with_cache(tokens_BT, positions_BT, mask, self._kv_cache)
        for row, (prompt, _) in enumerate(prompts, first):
            self._prefix_cache.put(adapter, prompt.keys, self._kv_cache.per_layer, row)
        prompts_U = self._start(hidden_BTH, starts, [prompt for prompt, _ in prompts])
        self._kv_cache.repeat(first, prompts_U)
        self._update_groups()

    def _start(self, hidden_BTH: Tensor, starts_B: Sequence[int], prompts: Sequence[Prompt]) -> list[int]:
        """Score prompts and choose the first tokens of their rows; add the rows that are not done.

        Args:
            hidden_BTH: right-padded hidden states of the prompts from position ``starts_B[b]`` on.

        Returns:
            For each of the ``U`` added rows, the index of its prompt.
        """
        self._score(hidden_BTH, starts_B, [prompt.rows for prompt in prompts])
        rows = [row for prompt in prompts for row in prompt.rows]
        prompt_of_R = torch.tensor([index for index, prompt in enumerate(prompts) for _ in prompt.rows])
        last_B = [len(prompt.tokens_T) - 1 - start for prompt, start in zip(prompts, starts_B, strict=True)]
        last_BH = hidden_BTH[torch.arange(len(prompts)), torch.tensor(last_B)]
        self._choose(rows, self.base.logits(last_BH), prompt_of_R, _params_of(rows, self.base.device))
        unfinished = [index for index, row in enumerate(rows) if not row.done]
        self.rows = [*self.rows, *(rows[index] for index in unfinished)]
        return prompt_of_R[unfinished].tolist()

    def _shrink_prefix_cache(self) -> None:
        self._prefix_cache.shrink(self._max_tokens - self._kv_cache.capacity)

    def _score(self, hidden_BTH: Tensor, starts_B: Sequence[int], groups: Sequence[Sequence[Row]]) -> None:
        requests = [[row.request for row in rows] for rows in groups]
        unscored = [i for i, shared in enumerate(requests) if any(request.prompt_scores is None for request in shared)]
        if unscored:
            jobs = [groups[index][0].request.job for index in unscored]
            starts = [starts_B[index] for index in unscored]
            scores = score_prompts(self.base, hidden_BTH[torch.tensor(unscored)], jobs, starts)
            for index, score in zip(unscored, scores, strict=True):
                for row in groups[index]:
                    row.request.prompt_scores = score

    def _choose(
        self, rows: Sequence[Row], logits_NV: Tensor, logits_of_R: Tensor | slice, params: RowSamplingParams
    ) -> None:
        """Choose the next token of each row; ``logits_of_R`` selects each row's logits from ``logits_NV``."""
        logits_RV, normalizer_R = logits_NV[logits_of_R], logits_NV.logsumexp(dim=1)[logits_of_R]
        uniform_R = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        tokens_R = choose_tokens(logits_RV, params, uniform_R.to(self.base.device))
        logprobs_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - normalizer_R
        for index, row in enumerate(rows):
            if k := min(row.request.job.topk_sample, logits_RV.shape[1]):
                top = (logits_RV[index] - normalizer_R[index]).topk(k)
                row.top.append(TopTokens(top.indices.int().cpu(), top.values.cpu()))
        for row, token, logprob in zip(rows, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            if not math.isfinite(logprob):
                row.request.is_finite, row.stopped = False, True
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stopped = ends_with_stop(row.tokens, row.request.job, self.base.loaded.tokenizer)

    def _update_groups(self) -> None:
        """Update the sampling parameters and the adapter assignment of all rows."""
        self._params = _params_of(self.rows, self.base.device)
        self._group_of_all = group_all(self.rows, self.base.device)
        if self._graphs and not self.rows:
            self._graphs.clear()


def bytes_per_token(base: BaseModel) -> int:
    """Memory of the keys and values of one token, according to the model's configuration."""
    config = base.loaded.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * base.loaded.model.dtype.itemsize


def _params_of(rows: Iterable[Row], device: torch.device) -> RowSamplingParams:
    jobs = [row.request.job for row in rows]
    return RowSamplingParams(
        torch.tensor([job.temperature for job in jobs], device=device),
        torch.tensor([job.top_k for job in jobs], device=device),
        torch.tensor([job.top_p for job in jobs], device=device),
    )

"""The running batch: rows join it, grow by a token per step, and leave it when they are done.

Rows of different lengths and adapters share a step: the base model's weights are read once for all of them. What a
row draws depends on its own seed and logits alone, so its company changes no more than the logits' last bits; and not
even these where the batch is deterministic (`engine.sampling.company`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from engine.compute.base import BaseModel
from engine.compute.batches import micro_batches, pad_right
from engine.compute.slots import STEP, Slots
from engine.sampling.choose import Choice, choose_tokens
from engine.sampling.company import Company, equal_companies, one_company
from engine.sampling.job import TopTokens
from engine.sampling.request import Row
from engine.sampling.score import score_prompts
from engine.sampling.stops import is_stopped


class Batch:
    """All rows in generation on one base model; only the compute thread changes it."""

    def __init__(self, base: BaseModel, cache_bytes: int, prefill_tokens: int, *, deterministic: bool = False) -> None:
        """Args:
        cache_bytes: how much memory keys and values may take.
        prefill_tokens: of one forward pass over prompts, padding included, unless it has one prompt.
        deterministic: whether a row's numbers are, to the bit, those that it would have in any other company.
        """
        self.base = base
        self.rows: list[Row] = []
        self._max_tokens = cache_bytes // bytes_per_token(base)
        self._prefill_tokens = 0 if deterministic else prefill_tokens
        self._deterministic = deterministic
        self._slots = Slots()
        self._choice: Choice | None = None
        self._everyone: Company | None = None

    def fits(self, newcomers: Sequence[Row]) -> bool:
        """Whether the keys and values of more rows have room; a row alone always has."""
        rows = [*self.rows, *newcomers]
        # A row that steps aside reads its own tokens anew, which gives other bits than writing them did.
        longest = max(row.max_tokens if self._deterministic else row.num_tokens for row in rows)
        return len(rows) == 1 or len(rows) * (longest + STEP) <= self._max_tokens

    def make_room(self) -> list[Row]:
        """Take rows out, the newest first, until a step has room; they can join again and go on."""
        out = []
        while len(self.rows) > 1 and len(self.rows) * (max(row.num_tokens for row in self.rows) + 1) > self._max_tokens:
            out.append(self.rows[-1])
            self.leave(lambda row: row is out[-1])
        return out

    def join(self, rows: Sequence[Row]) -> None:
        """Read prompts, with what their rows have so far, and choose the next token of each row."""
        for adapter in dict.fromkeys(row.request.adapter for row in rows):
            # Rows of one prompt are read once.
            groups: dict[object, list[Row]] = {}
            for row in (row for row in rows if row.request.adapter is adapter):
                groups.setdefault(row if row.tokens else row.request.prompt_key, []).append(row)
            prompts = list(groups.values())
            for indices in micro_batches([shared[0].num_tokens for shared in prompts], self._prefill_tokens):
                with self.base.using(adapter), torch.inference_mode():
                    self._prefill([prompts[index] for index in indices])

    def step(self) -> None:
        """One more token for every row."""
        assert self._everyone is not None
        companies = list(equal_companies(self.rows)) if self._deterministic else [self._everyone]
        with torch.inference_mode():
            self._slots.begin_step()
            for company in companies:
                self._step(company)
        self.leave(lambda row: row.done)

    def _step(self, company: Company) -> None:
        rows = [self.rows[index] for index in company.rows_C.tolist()]
        assert self._choice is not None
        with self.base.sharing(company.shares):
            positions_R1, mask = self._slots.turn_to(company.rows_C, company.width, self.base.device)
            hidden_R1H = self.base.decoder(
                input_ids=torch.tensor([[row.tokens[-1]] for row in rows], device=self.base.device),
                attention_mask=mask,
                position_ids=positions_R1,
                past_key_values=self._slots,
                use_cache=True,
                slots=self._slots,
            ).last_hidden_state
            some = slice(company.num_rows)
            self._choose(rows[some], hidden_R1H[:, 0], some, self._choice.select(company.rows_C[some]))

    def leave(self, goes: Callable[[Row], bool]) -> None:
        """Drop the rows that ``goes`` says."""
        gone = [index for index, row in enumerate(self.rows) if goes(row)]
        if not gone:
            return
        with torch.inference_mode():
            self.rows = [self.rows[index] for index in self._slots.drop(gone)]
        self._regroup()

    def _prefill(self, groups: Sequence[Sequence[Row]]) -> None:
        contexts = [rows[0].context_T() for rows in groups]
        lengths = [len(context_T) for context_T in contexts]
        cache = DynamicCache()
        hidden_BTH = self.base.decoder(
            input_ids=pad_right(contexts)[0].to(self.base.device), past_key_values=cache, use_cache=True
        ).last_hidden_state
        self._score(hidden_BTH, groups)
        rows = [row for group in groups for row in group]
        group_of_R = torch.tensor([index for index, group in enumerate(groups) for _ in group])
        last_BH = hidden_BTH[torch.arange(len(groups)), torch.tensor(lengths) - 1]
        self._choose(rows, last_BH, group_of_R, _choice(rows, self.base.device))
        staying = [index for index, row in enumerate(rows) if not row.done]
        if staying:
            kept = group_of_R[staying].tolist()
            self._slots.add(cache, kept, [lengths[group] for group in kept])
            self.rows = [*self.rows, *(rows[index] for index in staying)]
            self._regroup()

    def _score(self, hidden_BTH: Tensor, groups: Sequence[Sequence[Row]]) -> None:
        new = [index for index, rows in enumerate(groups) if any(row.request.prompt is None for row in rows)]
        if new:
            jobs = [groups[index][0].request.job for index in new]
            scores = score_prompts(self.base, hidden_BTH[torch.tensor(new)], jobs)
            for index, prompt in zip(new, scores, strict=True):
                for row in groups[index]:
                    row.request.prompt = prompt

    def _choose(self, rows: Sequence[Row], hidden_NH: Tensor, of_R: Tensor | slice, choice: Choice) -> None:
        """The next token of each row, whose hidden state is that of ``of_R``."""
        logits_NV = self.base.logits(hidden_NH)
        logits_RV, normalizer_R = logits_NV[of_R], logits_NV.logsumexp(dim=1)[of_R]
        uniform_R = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        tokens_R = choose_tokens(logits_RV, choice, uniform_R.to(self.base.device))
        logprobs_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - normalizer_R
        for index, row in enumerate(rows):
            if k := min(row.request.job.topk_sample, logits_RV.shape[1]):
                top = (logits_RV[index] - normalizer_R[index]).topk(k)
                row.top.append(TopTokens(top.indices.int().cpu(), top.values.cpu()))
        for row, token, logprob in zip(rows, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stopped = is_stopped(row.tokens, row.request.job, self.base.loaded.tokenizer)

    def _regroup(self) -> None:
        """How the rows choose, and which of them each adapter has."""
        self._choice = _choice(self.rows, self.base.device)
        self._everyone = one_company(self.rows, self.base.device)


def bytes_per_token(base: BaseModel) -> int:
    """What the keys and values of one token take, by the model's configuration."""
    config = base.loaded.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * base.loaded.model.dtype.itemsize


def _choice(rows: Iterable[Row], device: torch.device) -> Choice:
    jobs = [row.request.job for row in rows]
    return Choice(
        torch.tensor([job.temperature for job in jobs], device=device),
        torch.tensor([job.top_k for job in jobs], device=device),
        torch.tensor([job.top_p for job in jobs], device=device),
    )

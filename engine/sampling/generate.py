"""Generation for a batch of prompts under one adapter: one prefill, then a token per row and step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from engine.compute.base import BaseModel
from engine.compute.batches import pad_right
from engine.compute.logprobs import logits, target_logprobs
from engine.compute.lora import Adapter
from engine.sampling.choose import Choice, choose_tokens
from engine.sampling.job import Continuation, SampleJob, SampleResult


class _Row:
    """One continuation on its way."""

    def __init__(self, job: SampleJob, sample: int) -> None:
        self.job = job
        self.random = random.Random(f"{job.seed}:{sample}")
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.job.max_tokens


class Generation:
    """A batch of jobs; `advance` computes a few tokens at a time, so that other work can come in between.

    Prompts are padded to the right: the prefill then needs no mask, and later steps hide the gap.
    """

    def __init__(self, base: BaseModel, adapter: Adapter | None, jobs: Sequence[SampleJob]) -> None:
        self._base = base
        self._adapter = adapter
        self._jobs = jobs
        self._rows = [[_Row(job, sample) for sample in range(job.num_samples)] for job in jobs]
        self._prompt_logprobs: list[Tensor | None] = [None] * len(jobs)
        self._live: list[_Row] | None = None
        self._cache: DynamicCache | None = None

    @property
    def done(self) -> bool:
        return self._live is not None and not self._live

    def advance(self, num_steps: int) -> None:
        """Compute up to ``num_steps`` tokens of every row."""
        with self._base.using(self._adapter), torch.inference_mode():
            if self._live is None:
                self._prefill()
                num_steps -= 1
            for _ in range(num_steps):
                if not self._live:
                    return
                self._decode()

    def results(self) -> list[SampleResult]:
        """One result per job, in their order."""
        return [
            SampleResult([Continuation(row.tokens, row.logprobs, row.stopped) for row in rows], prompt_logprobs)
            for rows, prompt_logprobs in zip(self._rows, self._prompt_logprobs, strict=True)
        ]

    def _prefill(self) -> None:
        tokens_BT, real_N = pad_right([job.prompt_T for job in self._jobs])
        lengths_B = torch.tensor([len(job.prompt_T) for job in self._jobs])
        if any(job.max_tokens > 1 for job in self._jobs):
            self._cache = DynamicCache(config=self._base.loaded.model.config)
        hidden_BTH = self._base.decoder(
            input_ids=tokens_BT.to(self._base.device),
            past_key_values=self._cache,
            use_cache=self._cache is not None,
        ).last_hidden_state
        self._score_prompts(hidden_BTH)
        self._live = [row for rows in self._rows for row in rows]
        job_of_R = torch.repeat_interleave(torch.tensor([job.num_samples for job in self._jobs]))
        self._choice = Choice(
            *(
                torch.tensor([getattr(row.job, name) for row in self._live], device=self._base.device)[:, None][:, 0]
                for name in ("temperature", "top_k", "top_p")
            )
        )
        mask_BT = torch.zeros(tokens_BT.numel(), dtype=torch.bool)
        mask_BT[real_N] = True
        self._mask = mask_BT.reshape(tokens_BT.shape)[job_of_R].to(self._base.device)
        self._position_R = lengths_B[job_of_R].to(self._base.device)
        if self._cache is not None:
            self._cache.batch_select_indices(job_of_R.to(self._base.device))
        last_BH = hidden_BTH[torch.arange(len(self._jobs)), lengths_B - 1]
        self._choose(last_BH[job_of_R.to(self._base.device)])

    def _decode(self) -> None:
        assert self._live is not None
        assert self._cache is not None
        latest_R1 = torch.tensor([[row.tokens[-1]] for row in self._live], device=self._base.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(latest_R1), 1)], dim=1)
        hidden_R1H = self._base.decoder(
            input_ids=latest_R1,
            attention_mask=self._mask,
            position_ids=self._position_R[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        self._position_R = self._position_R + 1
        self._choose(hidden_R1H[:, 0])

    def _choose(self, hidden_RH: Tensor) -> None:
        assert self._live is not None
        uniform_R = torch.tensor([row.random.random() for row in self._live], dtype=torch.float64)
        tokens_R, logprobs_R = choose_tokens(
            logits(hidden_RH, self._base.head, self._base.head_lora()),
            self._choice,
            uniform_R.to(self._base.device),
        )
        for row, token, logprob in zip(self._live, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stopped = self._is_stop(row)
        self._drop_finished()

    def _is_stop(self, row: _Row) -> bool:
        if row.tokens[-1] in row.job.stop_tokens:
            return True
        if not row.job.stop_strings:
            return False
        text = self._base.loaded.tokenizer.decode(row.tokens)
        return any(stop in text for stop in row.job.stop_strings)

    def _drop_finished(self) -> None:
        assert self._live is not None
        kept = [index for index, row in enumerate(self._live) if not row.done]
        if len(kept) == len(self._live):
            return
        self._live = [self._live[index] for index in kept]
        if not kept:
            self._cache = None
            return
        kept_R = torch.tensor(kept, device=self._base.device)
        self._choice = self._choice.select(kept_R)
        self._mask, self._position_R = self._mask[kept_R], self._position_R[kept_R]
        assert self._cache is not None
        self._cache.batch_select_indices(kept_R)

    def _score_prompts(self, hidden_BTH: Tensor) -> None:
        asked = [index for index, job in enumerate(self._jobs) if job.prompt_logprobs]
        spans = {}
        for index in asked:
            length = len(self._jobs[index].prompt_T)
            spans[index] = (max(1, length - self._jobs[index].prompt_logprobs), length)
        if not asked:
            return
        hidden_NH = torch.cat([hidden_BTH[index, first - 1 : last - 1] for index, (first, last) in spans.items()])
        targets_N = torch.cat([self._jobs[index].prompt_T[first:last] for index, (first, last) in spans.items()])
        rows_N = torch.arange(len(targets_N), device=self._base.device)
        logprobs_N = target_logprobs(
            hidden_NH, self._base.head, self._base.head_lora(), rows_N, targets_N.to(self._base.device)
        ).cpu()
        for (index, (first, last)), part in zip(
            spans.items(), logprobs_N.split([last - first for first, last in spans.values()]), strict=True
        ):
            scored_T = torch.full((last,), float("nan"))
            scored_T[first:] = part
            self._prompt_logprobs[index] = scored_T

"""Frozen reference model and the cache of its logprobs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import numpy as np
import tinker
import torch
from tinker import types
from torch import Tensor

from blocks.errors import ServiceError
from objectives.batch import Batch, pack, unpack
from objectives.jsonl_cache import JsonlCache
from tasks.common.event_loop import run_coroutine
from tasks.common.prompt_scores import score_last_tokens
from tasks.common.service_errors import service_errors, wait_for_response
from tasks.common.task import retried_task
from tasks.training.batch_source import SampledTokens

REFERENCE_NAME = "reference.jsonl"


class Reference:
    """Frozen reference model.

    A sampling client scores the sequences, at the price of prompt tokens. It can only score the tokens of a sequence
    itself. For datums with other targets, such as K targets per position, a training client runs a forward pass.

    Attributes:
        cache: logprobs by the content of the datum.
        model: base model of the reference, on which the price depends.
    """

    def __init__(
        self,
        sampler: tinker.SamplingClient,
        open_trainer: Callable[[], tinker.TrainingClient],
        name: str,
        *,
        model: str = "",
        uses_cache: bool = True,
        can_score_last_n: bool = False,
    ) -> None:
        """Create a reference from clients that are never updated.

        Args:
            sampler: sampling client of the reference.
            open_trainer: opens a training client of the same weights; called for the first datum that needs it.
            name: name of the reference in the config.
            model: base model by its name on the service.
            uses_cache: False for sampled data, which does not repeat.
            can_score_last_n: True to score a sequence only from its first trained target on; earlier targets get 0.
        """
        self._sampler, self._open_trainer, self._trainer = sampler, open_trainer, None
        self._name, self.model, self._uses_cache, self.cache = name, model, uses_cache, JsonlCache()
        self._can_score_last_n = can_score_last_n
        # Batches of several steps are scored at once, by several threads.
        self._lock = Lock()
        self._sampled: dict[int, SampledTokens] = {}
        self._num_train_tokens: dict[int, int] = {}
        # Without the cache, the logprobs of the newest steps, which the KL penalty and the terms may both need.
        self._recent: dict[int, dict[str, str]] = {}

    def take_sampled(self, step: int) -> SampledTokens:
        """Return the tokens that the sampling client has processed for a step and earlier ones, and forget them."""
        with self._lock:
            counts = [self._sampled.pop(key) for key in list(self._sampled) if key <= step]
        return sum(counts, SampledTokens())

    def take_num_train_tokens(self, step: int) -> int:
        """Return the tokens that the training client has processed for a step and earlier ones, and forget them."""
        with self._lock:
            return sum(self._num_train_tokens.pop(key) for key in list(self._num_train_tokens) if key <= step)

    def logprobs(self, batch: Batch, step: int) -> Tensor:
        """Return the reference's logprobs of the batch's targets, float32, in nats, in the shape of the targets.

        With `can_score_last_n`, targets before the first trained one of a datum get 0.

        Args:
            step: step whose cost includes the tokens.

        Raises:
            ServiceError: the service failed, or returned logprobs of another shape or that are not finite.
        """
        targets_D = unpack(batch.target_tokens_DT, batch.offsets_D)
        firsts_D = [self._first_scored(mask_T) for mask_T in unpack(batch.mask_DT, batch.offsets_D)]
        # Cached logprobs of all targets also serve a datum of which only the last logprobs are needed.
        whole_D = self._keys(batch, targets_D)
        suffix_D = [f"{key}+{first}" if first else key for key, first in zip(whole_D, firsts_D, strict=True)]
        cached = self.cache.find([*whole_D, *suffix_D]) if self._uses_cache else self._find_recent(step)
        keys_D = [whole if whole in cached else suffix for whole, suffix in zip(whole_D, suffix_D, strict=True)]
        new = {key: d for d, key in enumerate(keys_D) if key not in cached}
        if new:
            new_D = self._compute(batch, list(new.values()), targets_D, firsts_D, step)
            for d, logprobs in zip(new.values(), new_D, strict=True):
                if logprobs.shape != targets_D[d].shape or not bool(logprobs.isfinite().all()):
                    raise ServiceError(
                        f"The reference {self._name!r} returned logprobs of shape {tuple(logprobs.shape)} for targets "
                        f"of shape {tuple(targets_D[d].shape)}, {int((~logprobs.isfinite()).sum())} of them not "
                        "finite: choose another reference or report this to the operator of the service."
                    )
            encoded = {key: _write(logprobs) for key, logprobs in zip(new, new_D, strict=True)}
            if self._uses_cache:
                self.cache.put(encoded)
            else:
                self._keep_recent(step, encoded)
            cached = {**cached, **encoded}
        logprobs_D = [_read(cached[key]).reshape(targets.shape) for key, targets in zip(keys_D, targets_D, strict=True)]
        return pack(logprobs_D)[0]

    def _find_recent(self, step: int) -> Mapping[str, str]:
        with self._lock:
            return dict(self._recent.get(step, {}))

    def _keep_recent(self, step: int, encoded: Mapping[str, str]) -> None:
        with self._lock:
            self._recent.setdefault(step, {}).update(encoded)
            # The next step may be scored while a step is still trained on.
            self._recent = {key: values for key, values in self._recent.items() if key >= step - 1}

    def _first_scored(self, mask_T: Tensor) -> int:
        """Index of the first target of a datum whose logprob is needed."""
        return int(mask_T.long().argmax()) if self._can_score_last_n else 0

    def _compute(
        self,
        batch: Batch,
        indices: Sequence[int],
        targets_D: Sequence[Tensor],
        firsts_D: Sequence[int],
        step: int,
    ) -> list[Tensor]:
        """Return the logprobs of some datums of a batch, in the order of `indices`."""
        datums, masks_D = list(batch.datums), unpack(batch.mask_DT, batch.offsets_D)
        scored = [d for d in indices if has_next_token_targets(datums[d], targets_D[d], masks_D[d])]
        others = [d for d in indices if d not in set(scored)]
        logprobs = self._score([(datums[d], targets_D[d], firsts_D[d]) for d in scored], step) if scored else []
        logprobs += self._forward([datums[d] for d in others], step) if others else []
        by_datum = dict(zip([*scored, *others], logprobs, strict=True))
        return [by_datum[d] for d in indices]

    def _score(self, sequences: Sequence[tuple[tinker.Datum, Tensor, int]], step: int) -> list[Tensor]:
        inputs = [datum.model_input.append_int(int(targets[-1])) for datum, targets, _ in sequences]
        firsts = [first for _, _, first in sequences] if self._can_score_last_n else None
        logprobs = score_sequences(self._sampler, inputs, f"score a sequence with the reference {self._name}", firsts)
        if firsts:
            logprobs = [
                torch.cat([torch.zeros(first), logprobs_T[first:]])
                for first, logprobs_T in zip(firsts, logprobs, strict=True)
            ]
        sampled = scored_tokens(sum(tokens.length - 1 for tokens in inputs), len(inputs))
        with self._lock:
            self._sampled[step] = self._sampled.get(step, SampledTokens()) + sampled
        return logprobs

    def _forward(self, datums: list[tinker.Datum], step: int) -> list[Tensor]:
        if self._trainer is None:
            self._trainer = self._open_trainer()
        response = wait_for_response(self._trainer.forward(datums, "cross_entropy"), "run the reference's forward pass")
        logprobs = [entry["logprobs"].to_torch().float() for entry in response.loss_fn_outputs]
        with self._lock:
            self._num_train_tokens[step] = self._num_train_tokens.get(step, 0) + sum(map(len, logprobs))
        return logprobs

    def _keys(self, batch: Batch, targets_D: list[Tensor]) -> list[str]:
        return [
            hashlib.sha256(
                f"{self._name}\0{datum.model_input.model_dump_json()}".encode() + targets.numpy().tobytes()
            ).hexdigest()
            for datum, targets in zip(batch.datums, targets_D, strict=True)
        ]


def score_sequences(
    sampler: tinker.SamplingClient,
    sequences: Sequence[types.ModelInput],
    action: str,
    firsts: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return the logprobs of all tokens but the first of each sequence, float32, in nats; NaN where not scored.

    Args:
        action: action of the request, for the error message.
        firsts: index of the first logprob that is needed of each sequence, if the service can score the end of a
            sequence alone (`supports_last_n`); None to score whole sequences.

    Raises:
        ServiceError: the service failed.
    """

    async def score(tokens: types.ModelInput, first: int) -> Tensor:
        with service_errors(action):
            logprobs = await score_last_tokens(sampler, tokens, first + 1, can_score_last_n=firsts is not None)
        # The first token of a sequence has no logprob.
        return torch.tensor([float("nan") if value is None else value for value in logprobs[1:]])

    async def score_all() -> list[Tensor]:
        return list(await asyncio.gather(*map(score, sequences, firsts or [0] * len(sequences))))

    return run_coroutine(score_all())


def scored_tokens(num_targets: int, num_datums: int) -> SampledTokens:
    """Count the billed tokens of `compute_logprobs`: a datum's input and last target, and one sampled token.

    >>> scored_tokens(num_targets=10, num_datums=2)
    SampledTokens(num_prefill_tokens=12, num_sample_tokens=2, num_cached_tokens=0, num_scoring_tokens=2)
    """
    return SampledTokens(num_targets + num_datums, num_datums, num_scoring_tokens=num_datums)


def has_next_token_targets(datum: tinker.Datum, targets: Tensor, mask_T: Tensor) -> bool:
    """Return whether each trained target of a datum is the next token of its input, so that a sampler can score it.

    Args:
        targets: target tokens, int64, ``(T,)`` or ``(T, K)``.
        mask_T: mask of the trained positions, bool ``(T,)``.

    >>> datum = tinker.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs={})
    >>> mask_T = torch.tensor([False, True, True])
    >>> has_next_token_targets(datum, torch.tensor([0, 7, 8]), mask_T)
    True
    >>> has_next_token_targets(datum, torch.tensor([0, 9, 8]), mask_T)
    False
    """
    if targets.ndim != 1:
        return False
    position = 0
    for chunk in datum.model_input.chunks:
        start, position = position, position + chunk.length
        if isinstance(chunk, types.EncodedTextChunk):
            # Position t predicts token t + 1; the first token of the input is no target.
            before = slice(max(start - 1, 0), position - 1)
            tokens = torch.tensor(chunk.tokens[max(1 - start, 0) :])
            if not torch.equal(targets[before][mask_T[before]], tokens[mask_T[before]]):
                return False
    return True


@retried_task(name="reference")
def load_reference(reference: Reference, batch: Batch, step: int) -> Tensor:
    """Compute the reference's logprobs of a batch, ahead of the step that needs them."""
    return reference.logprobs(batch, step)


def _write(logprobs: Tensor) -> str:
    return base64.b64encode(logprobs.numpy().astype("<f4").tobytes()).decode()


def _read(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy())

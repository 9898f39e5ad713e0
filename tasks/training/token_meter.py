"""Count of the tokens that sampling clients process for teachers and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import tinker
from tinker import types

from tasks.training.batch_source import SampledTokens


class TokenMeter:
    """Tokens of sampling clients by base model. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, SampledTokens] = {}

    def add(self, model: str, sampled: SampledTokens) -> None:
        """Count tokens of a base model."""
        with self._lock:
            self._counts[model] = self._counts.get(model, SampledTokens()) + sampled

    def take(self) -> Mapping[str, SampledTokens]:
        """Return the tokens by base model since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def watch(self, sampler: tinker.SamplingClient) -> None:
        """Count every response of a client: the prompt once for each sample, and the sampled tokens."""
        if isinstance(sampler, tinker.SamplingClient):  # evaluators of tests may get others
            sampler.__class__ = _WatchedClient
            vars(sampler)["meter"] = self


class _WatchedClient(tinker.SamplingClient):
    """Client whose responses a meter counts; `sample` and `compute_logprobs` both end in this method of the SDK."""

    meter: TokenMeter

    async def _sample_async_impl(
        self, prompt: types.ModelInput, num_samples: int, *args: Any, **options: Any
    ) -> types.SampleResponse:
        response = await super()._sample_async_impl(prompt, num_samples, *args, **options)
        num_sampled = sum(len(sequence.tokens) for sequence in response.sequences)
        # The service bills the prompts of all samples but the first as cache hits.
        num_cached = (num_samples - 1) * prompt.length + response.prompt_cache_hit_tokens
        counts = SampledTokens(num_samples * prompt.length, num_sampled, num_cached)
        self.meter.add(self.get_base_model(), counts)
        return response

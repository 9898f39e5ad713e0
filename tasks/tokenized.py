"""Evaluators that need the model's tokenizer beside a client to sample with."""

from __future__ import annotations

import tinker
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.tokenizer_utils import Tokenizer


class TokenizedEvaluator(SamplingClientEvaluator):
    """Is given the tokenizer, because a sampling client made from a training client knows only the model's name.

    Of the local engine's models, that name is none that the SDK could load a tokenizer by.
    """

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        """The metrics of what the client samples from."""
        raise NotImplementedError

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        return await self.measure(sampling_client, sampling_client.get_tokenizer())

"""Count of the tokens that sampling clients process for teachers, judges, reward models and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

import tinker
from tinker import types
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.tinker_internals import call_on_samples
from tasks.common.sampling import open_sampler
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

    def watch(self, sampler: tinker.SamplingClient, model: str = "") -> None:
        """Count the tokens of every response of a client.

        Args:
            model: base model; empty to ask the client. For saved sampler weights, a client of the local engine answers
                with the name of the tokenizer.
        """
        if not isinstance(sampler, tinker.SamplingClient):  # a test may pass another client to its evaluators
            return
        model = model or sampler.get_base_model()

        def count(prompt: types.ModelInput, num_samples: int, response: types.SampleResponse) -> None:
            self.add(model, count_tokens(prompt.length, num_samples, response))

        call_on_samples(sampler, count)


def count_tokens(num_prompt_tokens: int, num_samples: int, response: types.SampleResponse) -> SampledTokens:
    """Count the tokens of a request for several samples of one prompt.

    The service bills the prompts of all samples but the first as cache hits.
    """
    num_sampled = sum(len(sequence.tokens) for sequence in response.sequences)
    num_cached = (num_samples - 1) * num_prompt_tokens + response.prompt_cache_hit_tokens
    # `compute_logprobs` asks for the prompt's logprobs and for one token.
    is_scoring = response.prompt_logprobs is not None and num_sampled == 1
    return SampledTokens(num_samples * num_prompt_tokens, num_sampled, num_cached, num_sampled * is_scoring)


def open_counted_sampler(
    session: tinker.ServiceClient, path: str, model: str, meter: TokenMeter | None
) -> tuple[tinker.SamplingClient, Tokenizer]:
    """Open a sampling client as `open_sampler` does, and count its tokens.

    Args:
        meter: meter of the run; None outside of runs, where nothing is counted.
    """
    sampler, tokenizer = open_sampler(session, path, model)
    if meter:
        meter.watch(sampler)
    return sampler, tokenizer

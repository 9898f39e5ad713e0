"""Scores of the end of a sequence: the option `prompt_logprobs_last_n` of the Tinker SDK."""

from __future__ import annotations

import tinker
from tinker import types

from tasks.common.service_errors import service_errors


def supports_last_n(sampler: tinker.SamplingClient) -> bool:
    """Check whether a service can score the last tokens of a sequence alone, with one request of three tokens.

    Raises:
        ServiceError: the service failed.
    """
    with service_errors("score the last token of a sequence"):
        try:
            sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3]), 1).result()
        except (RuntimeError, tinker.BadRequestError, tinker.UnprocessableEntityError):
            # The SDK raises RuntimeError if a service scores the whole sequence; other services may reject the option.
            return False
    return True


async def score_last_tokens(
    sampler: tinker.SamplingClient, tokens: types.ModelInput, first: int, *, can_score_last_n: bool
) -> list[float | None]:
    """Return the logprob of each token of a sequence, in nats.

    Args:
        first: index of the first token whose logprob is needed, at least 1.
        can_score_last_n: True to score only the tokens from `first` on; earlier tokens then have no logprob.
    """
    return await sampler.compute_logprobs(tokens, last_n(tokens, first) if can_score_last_n else None)


def last_n(tokens: types.ModelInput, first: int) -> int | None:
    """Return the number of tokens from `first` on; None if every token that can have a logprob is among them.

    >>> last_n(types.ModelInput.from_ints([5, 6, 7, 8]), 2), last_n(types.ModelInput.from_ints([5, 6]), 1)
    (2, None)
    """
    return None if first <= 1 else tokens.length - first

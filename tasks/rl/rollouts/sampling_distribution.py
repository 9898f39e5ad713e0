"""Logprobs of the distribution that tokens were sampled from, with temperature, top-k and top-p.

A service returns the logprobs of the model itself. The distribution that it samples from has the probabilities
``p ** (1 / temperature)``, restricted to the likeliest tokens and normalized. Its normalizer follows from the logprobs
of the likeliest tokens, which the service returns with each sampled token, up to an error that is bounded here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import tinker
import torch
from tinker import types
from tinker.types.topk_logprobs import MASK_LOGPROB
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from tasks.common.service_errors import service_errors

LogprobsOf = Literal["sampled", "service"]

# Mean error of a logprob, in nats, above which a run does not start.
MAX_MEAN_ERROR = 0.02
# Largest difference, in nats, between the logprob that a service returns with a sampled token and the logprob that it
# returns when it scores that token. Both should be the model's own, up to rounding.
_MAX_DISTANCE = 0.2
_NUM_CHECKED = 16
# Upper bound of the number of tokens of a model; the largest vocabularies have about 2 ** 18 tokens.
_MAX_VOCABULARY = 2**19


@dataclass(frozen=True, slots=True)
class SamplingDistribution:
    """Distribution that rollouts are sampled from.

    Attributes:
        temperature: above 0.
        top_k: number of the likeliest tokens that can be sampled; None for all.
        top_p: only the smallest set of likeliest tokens whose total probability, after the temperature, reaches this
            value can be sampled.
        num_candidates: number of likeliest tokens to request for the normalizer; `num_requested` raises it to `top_k`.
        logprobs: ``"sampled"`` for the logprobs of this distribution, ``"service"`` for those that the service returns.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    num_candidates: int = 20
    logprobs: LogprobsOf = "sampled"

    @property
    def is_plain(self) -> bool:
        """True if it is the model's own distribution."""
        return self.temperature == 1 and self.top_k is None and self.top_p == 1

    @property
    def num_requested(self) -> int:
        """Number of likeliest tokens to request with each sampled token; 0 if none are needed."""
        return 0 if self.is_plain or self.logprobs == "service" else max(self.num_candidates, self.top_k or 0)

    def params(self, *, max_tokens: int, seed: int, stop: list[str] | list[int]) -> types.SamplingParams:
        """Return the parameters of a request."""
        return types.SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop=stop,
            temperature=self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=self.top_p,
        )

    def completion(self, sequence: types.SampledSequence) -> Completion:
        """Return a sampled sequence with the logprobs to train on.

        Raises:
            ConfigError: the service did not return the likeliest tokens, or it sampled a token that this distribution
                excludes.
        """
        if not self.num_requested:
            return Completion(sequence.tokens, sequence.logprobs, sequence.stop_reason)
        top = sequence.topk_logprobs_np
        if top is None or sequence.logprobs is None:
            raise ConfigError(
                "The service did not return the likeliest tokens, which are needed to compute the logprobs under "
                f"{self.describe()}: set rollout.logprobs to service, or sample with temperature 1 and "
                "without top_k and top_p."
            )
        logprobs_T = torch.tensor(sequence.logprobs, dtype=torch.float64)
        top_TK = torch.from_numpy(top.logprobs.copy()).double()
        values_T, errors_T = sampled_logprobs(logprobs_T, top_TK, self)
        return Completion(
            sequence.tokens,
            values_T.tolist(),
            sequence.stop_reason,
            errors=errors_T.tolist(),
            untempered=list(sequence.logprobs),
        )

    def describe(self) -> str:
        """Return the settings that differ from the model's own distribution, such as ``temperature=0.3``."""
        fields = {"temperature": self.temperature} if self.temperature != 1 else {}
        fields |= {"top_k": self.top_k} if self.top_k is not None else {}
        fields |= {"top_p": self.top_p} if self.top_p != 1 else {}
        return ", ".join(f"{name}={value:g}" for name, value in fields.items()) or "temperature=1"


@dataclass
class Completion(TokensWithLogprobs):
    """Sampled tokens with their logprobs, and the bound of each logprob's error.

    Attributes:
        errors: bound of each logprob's error, in nats; empty if the service's logprobs are used unchanged.
        untempered: logprobs under the weights alone, without temperature, top-k and top-p; empty if they are
            `logprobs`.
        duration_s: duration of the request.
    """

    errors: list[float] = field(default_factory=list)
    untempered: list[float] = field(default_factory=list)
    duration_s: float = field(default=0.0, compare=False)


def sampled_logprobs(logprobs_T: Tensor, top_TK: Tensor, distribution: SamplingDistribution) -> tuple[Tensor, Tensor]:
    """Compute the logprobs of sampled tokens under the distribution that they were sampled from.

    The probabilities of the tokens beyond the K likeliest are bounded by that of the K-th token and by the remaining
    probability. The normalizer is the geometric mean of its two bounds; without such tokens it is exact.

    Args:
        logprobs_T: float64 ``(T,)``, nats: logprob of each sampled token under the model.
        top_TK: float64 ``(T, K)``, nats, descending: logprobs of the K likeliest tokens at each position; of all tokens
            if there are fewer than `num_requested`.

    Returns:
        The logprobs and the bounds of their errors, nats, ``(T,)`` each.

    Raises:
        ConfigError: the distribution excludes a sampled token.

    >>> probs = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    >>> cold = SamplingDistribution(temperature=0.5)
    >>> logprobs_T, errors_T = sampled_logprobs(probs[:, 0].log(), probs.log(), cold)
    >>> round(logprobs_T.exp().item(), 4), errors_T.item()
    (0.6667, 0.0)
    """
    power = 1 / distribution.temperature
    # Relative to the likeliest token, so that a low temperature does not underflow.
    largest_T = top_TK[:, 0]
    rests = [(rest_T - power * largest_T).exp() for rest_T in _log_rest_bounds(top_TK, power)]
    logprobs_T = logprobs_T - largest_T
    scaled_TK = (power * (top_TK - largest_T[:, None])).exp()
    if distribution.top_k is not None:
        kept_TK = scaled_TK[:, : distribution.top_k]
        low_T = high_T = kept_TK.sum(1)
        smallest_T = kept_TK[:, -1]
    else:
        is_complete_T = (top_TK[:, -1] <= MASK_LOGPROB) | (top_TK.shape[1] < distribution.num_requested)
        low_T, high_T = (scaled_TK.sum(1) + torch.where(is_complete_T, 0.0, rest_T) for rest_T in rests)
        smallest_T = torch.zeros_like(low_T)
        if distribution.top_p < 1:
            low_T, _ = _nucleus(scaled_TK, low_T, distribution.top_p, excess_T=smallest_T)
            high_T, smallest_T = _nucleus(scaled_TK, high_T, distribution.top_p, excess_T=scaled_TK[:, -1])
    outside_T = (power * logprobs_T).exp() < smallest_T * (1 - 1e-3)
    if bool(outside_T.any()):
        raise ConfigError(
            f"The service sampled a token that {distribution.describe()} excludes, so it does not sample as requested: "
            "set rollout.logprobs to service, or leave out top_k and top_p."
        )
    normalizer_T = (low_T.log() + high_T.log()) / 2
    return power * logprobs_T - normalizer_T, (high_T.log() - low_T.log()).abs() / 2


def _log_rest_bounds(top_TK: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Logarithms of bounds of ``sum p ** power`` over the tokens beyond the likeliest, ``(T,)`` each, lower first."""
    rest_T = (1 - top_TK.exp().sum(1)).clamp(min=0).log()
    # A sum of powers is extreme if the remaining probability is spread evenly, or is on few tokens at their maximum.
    even_T = math.log(_MAX_VOCABULARY) + power * (rest_T - math.log(_MAX_VOCABULARY))
    dense_T = rest_T + (power - 1) * top_TK[:, -1]
    return torch.minimum(even_T, dense_T), torch.maximum(even_T, dense_T)


def _nucleus(scaled_TK: Tensor, total_T: Tensor, top_p: float, excess_T: Tensor) -> tuple[Tensor, Tensor]:
    """Mass of the smallest set of likeliest tokens with a share of at least `top_p`, and the mass of its last token.

    If the set extends beyond the K likeliest tokens, its mass is `top_p` of the total plus `excess_T`, by which the
    last token may exceed that share, and the mass of its last token counts as 0.
    """
    sums_TK = scaled_TK.cumsum(1)
    needed_T1 = top_p * total_T[:, None]
    inside_TK = sums_TK - scaled_TK < needed_T1
    mass_T = torch.where(inside_TK, scaled_TK, 0.0).sum(1)
    last_T = torch.where(inside_TK, scaled_TK, torch.inf).amin(1)
    is_beyond_T = sums_TK[:, -1] < needed_T1[:, 0]
    return torch.where(is_beyond_T, needed_T1[:, 0] + excess_T, mass_T), torch.where(is_beyond_T, 0.0, last_T)


def check_service(sampler: tinker.SamplingClient, tokenizer: Tokenizer, distribution: SamplingDistribution) -> None:
    """Check that a service returns the logprobs of the model itself with the samples of a distribution.

    The check samples a few tokens and compares their logprobs with the logprobs of the same tokens as part of a prompt,
    for which a service applies no temperature.

    Raises:
        ConfigError: the logprobs differ, or the service returned none.
        ServiceError: the service failed.
    """
    if not distribution.num_requested:
        return
    prompt = tinker.ModelInput.from_ints(tokenizer.encode("1 2 3"))
    with service_errors("check the logprobs of samples"):
        params = distribution.params(max_tokens=_NUM_CHECKED, seed=0, stop=[])
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        whole = tinker.ModelInput.from_ints([*prompt.to_ints(), *sequence.tokens])
        scores = sampler.compute_logprobs(whole).result()[prompt.length :]
    if not sequence.logprobs or None in scores:
        raise ConfigError(
            f"The service returned no logprobs with samples of {distribution.describe()}: set rollout.logprobs to "
            "service, or sample with temperature 1 and without top_k and top_p."
        )
    pairs = zip(sequence.logprobs, scores, strict=True)
    distance = max(abs(logprob - score) for logprob, score in pairs if score is not None)
    if distance > _MAX_DISTANCE:
        raise ConfigError(
            f"The logprobs that the service returned with samples of {distribution.describe()} differ from those of "
            f"the model by up to {distance:.2f} nats, so they may already include the temperature, top_k and top_p: "
            "set rollout.logprobs to service."
        )

"""Logprobs of samples with temperature, top-k and top-p, against an enumeration of the vocabulary."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from flows.config.rollout import RolloutConfig
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.sampling_distribution import Completion, SamplingDistribution, check_service, sampled_logprobs

PROMPT = types.ModelInput.from_ints([5, 6, 7])
NUM_SAMPLES = 256
DISTRIBUTIONS = [
    SamplingDistribution(temperature=0.3, num_candidates=1024),
    SamplingDistribution(temperature=2.0, num_candidates=1024),
    SamplingDistribution(top_k=5, num_candidates=1),
    SamplingDistribution(temperature=0.3, top_k=5),
    SamplingDistribution(top_p=0.2, num_candidates=1024),
    SamplingDistribution(temperature=0.2, top_p=0.3, num_candidates=100),
]


def enumerate_probs(probs: list[float], distribution: SamplingDistribution) -> list[float]:
    """Probability of every token, by loops over the vocabulary."""
    powers = [prob ** (1 / distribution.temperature) for prob in probs]
    total = sum(powers)
    order = sorted(range(len(probs)), key=lambda token: -powers[token])
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if mass >= distribution.top_p or rank >= (distribution.top_k or len(probs)):
            break
        kept.append(token)
        mass += powers[token] / total
    kept_total = sum(powers[token] for token in kept)
    return [powers[token] / kept_total if token in kept else 0.0 for token in range(len(probs))]


@pytest.fixture(scope="module")
def service(engine_url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny").result()


@pytest.fixture(scope="module")
def tokenizer(service: tinker.ServiceClient) -> Tokenizer:
    return service.create_lora_training_client("tiny", rank=4).result().get_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> list[float]:
    """Probability of every token after the prompt, from the scores of the prompt with each of them."""
    size = len(tokenizer)
    targets = types.TensorData.from_torch(torch.arange(size).expand(PROMPT.length, size).contiguous())
    request = types.SamplingParams(max_tokens=1)
    result = sampler.sample(PROMPT.append_int(0), 1, request, target_prompt_logprobs=targets).result()
    assert result.target_prompt_logprobs is not None
    probs = result.target_prompt_logprobs.to_torch()[-1].exp().tolist()
    assert sum(probs) == pytest.approx(1, abs=1e-4)
    return probs


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=SamplingDistribution.describe)
def test_samples_of_the_engine_have_the_logprobs_of_an_enumerated_vocabulary(sampler, vocabulary, distribution):
    members = SnapshotCompleter(sampler, 1, distribution, (0,)).members(0, NUM_SAMPLES)

    async def sample() -> list[TokensWithLogprobs]:
        return await asyncio.gather(*(member(PROMPT, []) for member in members))

    completions = asyncio.run(sample())
    exact = enumerate_probs(vocabulary, distribution)
    for completion in completions:
        assert isinstance(completion, Completion)
        (token,), (logprob,), (error,) = completion.tokens, completion.logprobs, completion.errors
        assert error < 1e-3
        assert logprob == pytest.approx(math.log(exact[token]), abs=2e-3)
    # The tokens themselves follow the enumerated distribution: mean logprob within five standard errors of -entropy.
    mean = sum(completion.logprobs[0] for completion in completions) / NUM_SAMPLES
    logs = [math.log(prob) if prob else 0.0 for prob in exact]
    expected = sum(prob * log for prob, log in zip(exact, logs, strict=True))
    deviation = sum(prob * (log - expected) ** 2 for prob, log in zip(exact, logs, strict=True)) ** 0.5
    assert abs(mean - expected) < 5 * deviation / NUM_SAMPLES**0.5 + 2e-3
    counts = Counter(completion.tokens[0] for completion in completions)
    assert all(exact[token] > 0 for token in counts)


def test_ratios_to_the_sampled_distribution_average_to_one(sampler, vocabulary):
    """The expectation of an importance ratio is 1 under the sampled logprobs; with the service's it is always 1."""
    exact = enumerate_probs(vocabulary, cold := SamplingDistribution(temperature=0.3, num_candidates=1024))
    top = torch.tensor(vocabulary, dtype=torch.float64).log()
    logprobs, _ = sampled_logprobs(top, top.sort(descending=True).values.expand(len(top), -1), cold)
    ratios = (top - logprobs).exp().tolist()
    assert sum(prob * ratio for prob, ratio in zip(exact, ratios, strict=True)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("num_candidates", [3, 8])
def test_a_temperature_near_zero_has_finite_logprobs(num_candidates):
    top = torch.linspace(0, -2, 8, dtype=torch.float64).log_softmax(0)
    cold = SamplingDistribution(temperature=1e-3, num_candidates=num_candidates)
    logprobs, errors = sampled_logprobs(top[:2], top[:num_candidates].expand(2, -1), cold)
    torch.testing.assert_close(logprobs, (1000 * top).log_softmax(0)[:2], atol=1e-6, rtol=1e-9)
    assert (errors < 1e-6).all()


def test_settings_are_named_unless_they_are_those_of_the_model():
    assert SamplingDistribution().describe() == "temperature=1"
    assert SamplingDistribution(top_k=1).describe() == "top_k=1"
    assert SamplingDistribution(temperature=0.5, top_p=0.9).describe() == "temperature=0.5, top_p=0.9"


@given(
    st.integers(0, 2**16),
    st.sampled_from([0.2, 0.7, 1.0, 1.5, 3.0]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.integers(1, 40),
    st.floats(0.1, 5.0),
)
def test_the_bound_holds_for_any_number_of_candidates(seed, temperature, top_p, num_candidates, spread):
    generator = torch.Generator().manual_seed(seed)
    logprobs = (spread * torch.randn(40, generator=generator, dtype=torch.float64)).log_softmax(0)
    distribution = SamplingDistribution(temperature, top_p=top_p, num_candidates=num_candidates)
    exact = enumerate_probs(logprobs.exp().tolist(), distribution)
    support = [token for token, prob in enumerate(exact) if prob > 0]
    top_TK = logprobs.sort(descending=True).values[:num_candidates].expand(len(support), -1)
    values_T, errors_T = sampled_logprobs(logprobs[support], top_TK, distribution)
    expected_T = torch.tensor([exact[token] for token in support], dtype=torch.float64).log()
    assert ((values_T - expected_T).abs() <= errors_T + 1e-6).all()


def test_a_token_outside_of_the_support_is_refused() -> None:
    logprobs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    top_TK = logprobs.expand(1, -1)
    for distribution in (SamplingDistribution(top_k=2), SamplingDistribution(top_p=0.4)):
        with pytest.raises(ConfigError, match="sampled a token that top_"):
            sampled_logprobs(logprobs[2:], top_TK, distribution)


def test_a_service_that_returns_other_logprobs_is_refused(sampler, tokenizer) -> None:
    """A service with logprobs of the tempered distribution, and one without likeliest tokens."""
    cold = SamplingDistribution(temperature=0.3)
    check_service(sampler, tokenizer, cold)

    class Tempered:
        def sample(self, *arguments: Any) -> Any:
            (sequence,) = sampler.sample(*arguments).result().sequences
            changed = SimpleNamespace(tokens=sequence.tokens, logprobs=[0.5 * value for value in sequence.logprobs])
            return SimpleNamespace(result=lambda: SimpleNamespace(sequences=[changed]))

        compute_logprobs = sampler.compute_logprobs

    with pytest.raises(ConfigError, match=r"samples of temperature=0.3 differ from those of the model by up to \d"):
        check_service(cast(Any, Tempered()), tokenizer, cold)
    check_service(cast(Any, None), tokenizer, SamplingDistribution(temperature=0.3, logprobs="service"))

    sequence = types.SampledSequence("stop", "0", _tokens_list=[1], _logprobs_list=[-1.0])
    with pytest.raises(ConfigError, match="did not return the likeliest tokens"):
        cold.completion(sequence)
    assert SamplingDistribution().completion(sequence).logprobs == [-1.0]


def test_top_k_with_top_p_is_refused() -> None:
    with pytest.raises(ValueError, match="services differ in which one they apply first"):
        RolloutConfig(top_k=5, top_p=0.9)
    assert "top_k" in repr(RolloutConfig(top_k=5))

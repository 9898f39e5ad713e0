"""Sampling through the real SDK."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from sampling_jobs import make_job
from tinker import types

from engine.sampling.choose import RowSamplingParams, choose_tokens
from engine.sampling.request import SamplingRequest

PROMPT = types.ModelInput.from_ints(list(b"to be or"))


def sample(client: tinker.SamplingClient, num_samples: int = 1, **params: object) -> list[types.SampledSequence]:
    merged = types.SamplingParams(**{"max_tokens": 12, "stop": [], **params})  # pyright: ignore[reportArgumentType]
    return list(client.sample(PROMPT, num_samples, merged).result().sequences)


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny").result()


def test_prompt_logprobs_equal_training_logprobs(trainer: tinker.TrainingClient, batch: list[types.Datum]) -> None:
    """A snapshot taken during training scores many prompts at once, so that they share batches."""
    for _ in range(3):
        trainer.forward_backward(batch, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    client = trainer.save_weights_and_get_sampling_client().result()
    expected = trainer.forward(batch, "cross_entropy").result().loss_fn_outputs
    trainer.forward_backward(batch, "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    sequences = [
        types.ModelInput.from_ints([datum.model_input.to_ints()[0], *datum.loss_fn_inputs["target_tokens"].tolist()])
        for datum in batch
    ]
    futures = [client.compute_logprobs(tokens) for tokens in sequences for _ in range(4)]
    for index, future in enumerate(futures):
        first, *rest = future.result()
        assert first is None
        np.testing.assert_allclose(rest, expected[index // 4]["logprobs"].tolist(), atol=1e-4)


def test_sampled_logprobs_equal_prefill_logprobs(sampler: tinker.SamplingClient) -> None:
    """Cached, batched decoding and a prefill give equal logprobs at any temperature."""
    for sequence in sample(sampler, 3, temperature=0.7, top_k=50, top_p=0.9, seed=4):
        whole = types.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
        again = sampler.compute_logprobs(whole).result()[PROMPT.length :]
        np.testing.assert_allclose(sequence.logprobs, again, atol=1e-4)  # pyright: ignore[reportArgumentType]


def test_seed_repeats_samples_and_samples_differ(sampler: tinker.SamplingClient) -> None:
    first, second = sample(sampler, 2, seed=1)
    assert first.tokens != second.tokens
    assert [s.tokens for s in sample(sampler, 2, seed=1)] == [first.tokens, second.tokens]
    assert sample(sampler, seed=2)[0].tokens != first.tokens
    assert sample(sampler)[0].tokens != sample(sampler)[0].tokens
    assert first.stop_reason == "length"
    assert len(first.tokens) == 12


def test_negative_seeds_are_seeds_of_their_own() -> None:
    requests = [SamplingRequest(make_job(seed, num_samples=5), None) for seed in (-2, 2)]
    numbers = {row.random.random() for request in requests for row in request.rows}
    assert len(numbers) == 9  # of the seeds -2 to 6; both requests have 2


def test_greedy_chooses_the_likeliest_token(sampler: tinker.SamplingClient) -> None:
    greedy = sample(sampler, temperature=0)[0].tokens
    assert greedy == sample(sampler, temperature=1, top_k=1)[0].tokens
    assert greedy == sample(sampler, temperature=1, top_p=1e-9)[0].tokens


def test_sample_ends_with_its_stop(sampler: tinker.SamplingClient) -> None:
    free = sample(sampler, seed=1)[0]
    by_token = sample(sampler, seed=1, stop=[free.tokens[4]])[0]
    assert by_token.stop_reason == "stop"
    assert by_token.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    ascii_run = [200 if token > 127 else token for token in free.tokens]
    first_ascii = next(i for i, token in enumerate(ascii_run) if 32 < token < 127)
    by_text = sample(sampler, seed=1, stop=[chr(free.tokens[first_ascii])])[0]
    assert by_text.stop_reason == "stop"
    assert by_text.tokens == free.tokens[: first_ascii + 1]


def test_concurrent_requests_equal_single_requests(sampler: tinker.SamplingClient) -> None:
    """Prompts and completions of different lengths give the same tokens in one batch as alone."""
    prompts = [types.ModelInput.from_ints(list(b"abcdefghij"[:length])) for length in (1, 4, 10)]
    params = [types.SamplingParams(max_tokens=n, temperature=0, stop=[]) for n in (1, 9, 5)]
    futures = [sampler.sample(p, 2, q) for p, q in zip(prompts, params, strict=True)]
    together = [[s.tokens for s in future.result().sequences] for future in futures]
    alone = [
        [s.tokens for s in sampler.sample(p, 2, q).result().sequences] for p, q in zip(prompts, params, strict=True)
    ]
    assert together == alone
    assert [len(tokens[0]) for tokens in alone] == [1, 9, 5]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "The prompt is empty"),
        ([1, 999], {}, "The prompt has the token id 999"),
        ([7] * 4097, {}, "the model's context is 4096"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_error_names_the_bad_parameter(
    sampler: tinker.SamplingClient, prompt: list[int], params: dict[str, float], message: str
) -> None:
    sampling_params = types.SamplingParams(**params)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tinker.RequestFailedError) as error:
        sampler.sample(types.ModelInput.from_ints(prompt), 1, sampling_params).result()
    assert message in str(error.value)


def test_error_names_the_missing_checkpoint(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError, match="There is no checkpoint"):
        service.create_sampling_client(model_path="tinker://x:train:0/sampler_weights/a").result()


def test_tokenizer_of_a_sampler_loads(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_weights_for_sampler("a").result().path
    tokenizer = service.create_sampling_client(model_path=path).result().get_tokenizer()
    assert tokenizer.encode("ab") == [97, 98]


def test_draws_follow_the_distribution() -> None:
    """Frequencies of 20,000 draws match the probabilities, also under top-k and top-p limits."""
    logits_V = torch.tensor([20.0, 19.0, 18.0, 17.0, float("-inf")])
    num = 20_000
    uniform_R = torch.rand(num, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def frequencies(temperature: float, top_k: int, top_p: float) -> torch.Tensor:
        choice = RowSamplingParams(
            torch.full((num,), temperature), torch.full((num,), top_k), torch.full((num,), top_p)
        )
        tokens_R = choose_tokens(logits_V.expand(num, -1), choice, uniform_R)
        return torch.bincount(tokens_R, minlength=5) / num

    torch.testing.assert_close(frequencies(1.0, 5, 1.0), logits_V.softmax(0), atol=0.01, rtol=0)
    torch.testing.assert_close(frequencies(0.5, 5, 1.0), (2 * logits_V).softmax(0), atol=0.01, rtol=0)
    for cold in (0.0, 1e-39, 1e-37, 1e-30, 1e-10):
        assert frequencies(cold, 5, 1.0)[0] == 1
        assert frequencies(cold, 4, 0.9)[0] == 1
    two = logits_V[:2].softmax(0)
    torch.testing.assert_close(frequencies(1.0, 2, 1.0)[:2], two, atol=0.01, rtol=0)
    torch.testing.assert_close(frequencies(1.0, 5, 0.7)[:2], two, atol=0.01, rtol=0)

"""What samples say beside their tokens, against a full softmax over the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from engine.compute.base import BaseModel

PROMPT = types.ModelInput.from_ints(list(b"to be or not"))
LENGTH = PROMPT.length


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny").result()


def ask(client: tinker.SamplingClient, max_tokens: int = 1, seed: int = 3, **asked: Any) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[], seed=seed, temperature=0.8)
    return client.sample(PROMPT, 1, params, **asked).result()


def reference(base: BaseModel, tokens: list[int]) -> Tensor:
    """Logprobs ``(T - 1, V)`` of each token after the first."""
    with torch.inference_mode():
        logits = base.loaded.model(torch.tensor([tokens])).logits[0].float()
    return logits[:-1].log_softmax(dim=1)


def test_top_prompt_tokens(sampler: tinker.SamplingClient, base: BaseModel) -> None:
    top = ask(sampler, topk_prompt_logprobs=5).topk_prompt_logprobs
    expected = reference(base, PROMPT.to_ints()).topk(5, dim=1)
    assert top is not None
    assert top[0] is None
    for position, row in enumerate(top[1:]):
        assert row is not None
        assert [token for token, _ in row] == expected.indices[position].tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], expected.values[position], atol=1e-4)


def test_the_last_prompt_tokens_only(sampler: tinker.SamplingClient) -> None:
    whole = ask(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    last = ask(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3)
    assert last.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert last.prompt_logprobs[:-3] == [None] * (LENGTH - 3)
    assert last.prompt_logprobs[-3:] == pytest.approx(whole.prompt_logprobs[-3:], rel=1e-5)
    assert last.topk_prompt_logprobs is not None
    assert whole.topk_prompt_logprobs is not None
    assert last.topk_prompt_logprobs[:-3] == [None] * (LENGTH - 3)
    for ours, full in zip(last.topk_prompt_logprobs[-3:], whole.topk_prompt_logprobs[-3:], strict=True):
        assert ours is not None
        assert full is not None
        assert [token for token, _ in ours] == [token for token, _ in full]
        # Fewer rows at once take another path through the matrix product on some processors.
        np.testing.assert_allclose([each for _, each in ours], [each for _, each in full], rtol=1e-5)


def test_top_sampled_tokens(sampler: tinker.SamplingClient, base: BaseModel) -> None:
    (sequence,) = ask(sampler, max_tokens=6, topk_sample_logprobs=3).sequences
    expected = reference(base, [*PROMPT.to_ints(), *sequence.tokens])[LENGTH - 1 :].topk(3, dim=1)
    assert sequence.topk_logprobs is not None
    assert len(sequence.topk_logprobs) == 6
    for position, row in enumerate(sequence.topk_logprobs):
        assert row is not None
        assert [token for token, _ in row] == expected.indices[position].tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], expected.values[position], atol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_given_tokens(sampler: tinker.SamplingClient, base: BaseModel, sparse: bool) -> None:
    """Some positions name none, one, or several tokens; the answer has the layout of the question."""
    ids = torch.full((LENGTH - 1, 3), -1)
    ids[2, 0], ids[5], ids[LENGTH - 2, 1] = 101, torch.tensor([0, 101, 263]), 32
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    asked = make(ids, pad_value=-1) if sparse else make(ids)
    assert (asked.sparse_crow_indices is not None) == sparse
    got = ask(sampler, target_prompt_logprobs=asked).target_prompt_logprobs
    assert got is not None
    assert (got.sparse_crow_indices is not None) == sparse
    expected = reference(base, PROMPT.to_ints()).gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    torch.testing.assert_close(got.to_torch(), expected, atol=1e-4, rtol=0)


def test_draws_at_every_prompt_position(sampler: tinker.SamplingClient, base: BaseModel) -> None:
    """With replacement, at the request's temperature: frequencies of 1,000 draws at one position, logprobs of all."""
    drawn = ask(sampler, prompt_alt_tokens_k=1000).prompt_alt_tokens
    assert drawn is not None
    tokens, logprobs = drawn.tokens.to_torch(), drawn.logprobs.to_torch()
    assert tokens.shape == logprobs.shape == (LENGTH - 1, 1000)
    expected = reference(base, PROMPT.to_ints())
    torch.testing.assert_close(logprobs, expected.gather(1, tokens), atol=1e-4, rtol=0)
    warm = (expected[4] / 0.8).softmax(0)
    frequencies = torch.bincount(tokens[4], minlength=len(warm)) / 1000
    assert float((frequencies - warm).abs().max()) < 5 * float((warm.max() / 1000) ** 0.5)
    again = ask(sampler, prompt_alt_tokens_k=1000).prompt_alt_tokens
    assert again is not None
    assert torch.equal(again.tokens.to_torch(), tokens)


def test_sampling_scoring_and_training_agree_on_a_trained_adapter(
    trainer: tinker.TrainingClient, batch: list[types.Datum], base: BaseModel
) -> None:
    """Decoding with a cache, compute_logprobs and a training forward pass, to 1e-4."""
    for _ in range(4):
        trainer.forward_backward(batch, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    client = trainer.save_weights_and_get_sampling_client().result()
    for temperature in (0.7, 1.3):
        params = types.SamplingParams(max_tokens=20, stop=[], seed=5, temperature=temperature)
        for sequence in client.sample(PROMPT, 3, params).result().sequences:
            whole = [*PROMPT.to_ints(), *sequence.tokens]
            scored = client.compute_logprobs(types.ModelInput.from_ints(whole)).result()[1:]
            datum = types.Datum(types.ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})  # pyright: ignore[reportArgumentType]
            trained = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
            np.testing.assert_allclose(scored, trained, atol=1e-4)  # pyright: ignore[reportArgumentType]
            assert sequence.logprobs is not None
            np.testing.assert_allclose(sequence.logprobs, trained[LENGTH - 1 :], atol=1e-4)
            fresh = reference(base, whole).gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
            assert float((fresh - torch.tensor(trained)).abs().max()) > 0.1  # the adapter does something


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"topk_prompt_logprobs": 5000}, "topk_prompt_logprobs is 5000"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1"),
        ({"target_prompt_logprobs": torch.zeros(3, 2, dtype=torch.int64)}, r"give a tensor of shape \(11, K\)"),
        ({"target_prompt_logprobs": torch.full((11, 1), 999)}, "target_prompt_logprobs holds the token id 999"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 99}, "give 1 to 11"),
    ],
)
def test_what_cannot_be_scored_is_named(sampler: tinker.SamplingClient, asked: dict[str, Any], sentence: str) -> None:
    if isinstance(ids := asked.get("target_prompt_logprobs"), Tensor):
        asked = {"target_prompt_logprobs": types.TensorData.from_torch(ids)}
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        ask(sampler, **asked)

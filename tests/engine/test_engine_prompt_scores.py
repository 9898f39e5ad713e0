"""Prompt scores and top tokens of samples, compared with a full softmax over the whole sequence."""

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


def sample(client: tinker.SamplingClient, max_tokens: int = 1, seed: int = 3, **options: Any) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[], seed=seed, temperature=0.8)
    return client.sample(PROMPT, 1, params, **options).result()


def reference(base: BaseModel, tokens: list[int]) -> Tensor:
    """Compute logprobs ``(T - 1, V)`` at all positions after the first token."""
    with torch.inference_mode():
        logits = base.loaded.model(torch.tensor([tokens])).logits[0].float()
    return logits[:-1].log_softmax(dim=1)


def test_top_prompt_tokens(sampler: tinker.SamplingClient, base: BaseModel) -> None:
    top = sample(sampler, topk_prompt_logprobs=5).topk_prompt_logprobs
    expected = reference(base, PROMPT.to_ints()).topk(5, dim=1)
    assert top is not None
    assert top[0] is None
    for position, row in enumerate(top[1:]):
        assert row is not None
        assert [token for token, _ in row] == expected.indices[position].tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], expected.values[position], atol=1e-4)


def test_scores_of_only_the_last_prompt_tokens(sampler: tinker.SamplingClient) -> None:
    whole = sample(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    last = sample(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3)
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
        # On some processors, a matrix product with fewer rows uses another kernel.
        np.testing.assert_allclose([logprob for _, logprob in ours], [logprob for _, logprob in full], rtol=1e-5)


def test_top_sampled_tokens(sampler: tinker.SamplingClient, base: BaseModel) -> None:
    (sequence,) = sample(sampler, max_tokens=6, topk_sample_logprobs=3).sequences
    expected = reference(base, [*PROMPT.to_ints(), *sequence.tokens])[LENGTH - 1 :].topk(3, dim=1)
    assert sequence.topk_logprobs is not None
    assert len(sequence.topk_logprobs) == 6
    for position, row in enumerate(sequence.topk_logprobs):
        assert row is not None
        assert [token for token, _ in row] == expected.indices[position].tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], expected.values[position], atol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_target_tokens(sampler: tinker.SamplingClient, base: BaseModel, sparse: bool) -> None:
    """Positions have no, one or several target tokens; the response has the layout of the request."""
    ids = torch.full((LENGTH - 1, 3), -1)
    ids[2, 0], ids[5], ids[LENGTH - 2, 1] = 101, torch.tensor([0, 101, 263]), 32
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    targets = make(ids, pad_value=-1) if sparse else make(ids)
    assert (targets.sparse_crow_indices is not None) == sparse
    logprobs = sample(sampler, target_prompt_logprobs=targets).target_prompt_logprobs
    assert logprobs is not None
    assert (logprobs.sparse_crow_indices is not None) == sparse
    expected = reference(base, PROMPT.to_ints()).gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    torch.testing.assert_close(logprobs.to_torch(), expected, atol=1e-4, rtol=0)


def test_draws_at_every_prompt_position(sampler: tinker.SamplingClient, base: BaseModel) -> None:
    """Draws are with replacement, at the request's temperature; frequencies are checked at one position."""
    draws = sample(sampler, prompt_alt_tokens_k=1000).prompt_alt_tokens
    assert draws is not None
    tokens, logprobs = draws.tokens.to_torch(), draws.logprobs.to_torch()
    assert tokens.shape == logprobs.shape == (LENGTH - 1, 1000)
    expected = reference(base, PROMPT.to_ints())
    torch.testing.assert_close(logprobs, expected.gather(1, tokens), atol=1e-4, rtol=0)
    probs = (expected[4] / 0.8).softmax(0)
    frequencies = torch.bincount(tokens[4], minlength=len(probs)) / 1000
    assert float((frequencies - probs).abs().max()) < 5 * float((probs.max() / 1000) ** 0.5)
    again = sample(sampler, prompt_alt_tokens_k=1000).prompt_alt_tokens
    assert again is not None
    assert torch.equal(again.tokens.to_torch(), tokens)


def test_sampling_scoring_and_training_agree(
    trainer: tinker.TrainingClient, batch: list[types.Datum], base: BaseModel
) -> None:
    """Cached decoding, compute_logprobs and a training forward pass agree to 1e-4 on a trained adapter."""
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
            assert float((fresh - torch.tensor(trained)).abs().max()) > 0.1  # the adapter has an effect


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_prompt_logprobs": 5000}, "topk_prompt_logprobs is 5000"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1"),
        ({"target_prompt_logprobs": torch.zeros(3, 2, dtype=torch.int64)}, r"int64 of shape \(11, K\)"),
        ({"target_prompt_logprobs": torch.full((11, 1), 999)}, "target_prompt_logprobs has the token id 999"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 99}, "prompt_logprobs_last_n is 99"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 12}, "use 1 to 11"),
    ],
)
def test_error_names_the_invalid_option(sampler: tinker.SamplingClient, options: dict[str, Any], message: str) -> None:
    if isinstance(ids := options.get("target_prompt_logprobs"), Tensor):
        options = {"target_prompt_logprobs": types.TensorData.from_torch(ids)}
    with pytest.raises(tinker.RequestFailedError, match=message):
        sample(sampler, **options)

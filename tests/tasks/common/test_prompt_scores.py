"""Scores of the ends of sequences by reference and teachers, compared with scores of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY
from tinker import types

from objectives.batch import Batch, pack_targets
from tasks.common.event_loop import open_workers
from tasks.common.prompt_scores import supports_last_n
from tasks.training.datums import Datums
from tasks.training.reference import Reference
from tasks.training.teacher import Teacher, TeacherRequest, compute_top_k, hard_datum, score

# Prompts of 0, 3 and 8 tokens that are not trained on, and a datum with two trained parts.
WEIGHTS = ([1.0] * 4, [0.0] * 3 + [1.0] * 5, [0.0] * 8 + [1.0], [0.0] * 2 + [1.0] * 2 + [0.0] * 2 + [1.0])


def datums() -> list[tinker.Datum]:
    return [hard_datum(list(range(20 * d, 20 * d + len(weights))), weights) for d, weights in enumerate(WEIGHTS, 1)]


def packed() -> Batch:
    fields = ("target_tokens", "weights")
    targets_D, weights_D = ([datum.loss_fn_inputs[key].to_torch() for datum in datums()] for key in fields)
    return pack_targets(targets_D, weights_D, str, datums=Datums(datums()))


@pytest.fixture
def sampler(engine_url: str) -> tinker.SamplingClient:
    return tinker.ServiceClient(base_url=engine_url, api_key=API_KEY).create_sampling_client(base_model="tiny").result()


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Values of the option in all requests."""
    values = []
    send = tinker.SamplingClient._send_asample_request

    async def record(client: tinker.SamplingClient, *args: Any) -> Any:
        values.append(args[-1])
        return await send(client, *args)

    monkeypatch.setattr(tinker.SamplingClient, "_send_asample_request", record)
    return values


def test_teachers(sampler: tinker.SamplingClient, requested: list[int | None]) -> None:
    whole, last = ([TeacherRequest(Teacher(sampler, "base", has), d) for d in datums()] for has in (False, True))
    with open_workers():
        for ours, theirs in zip(score.fn(last), score.fn(whole), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        # All requests of one list are sent at the same time.
        assert sorted(value for value in requested if value) == [1, 5, 5]
        for ours, theirs in zip(compute_top_k.fn(last, 4), compute_top_k.fn(whole, 4), strict=True):
            assert torch.equal(ours.tokens_MK, theirs.tokens_MK)
            torch.testing.assert_close(ours.probs_MK, theirs.probs_MK, atol=1e-5, rtol=0)
            torch.testing.assert_close(ours.target_logprobs_M, theirs.target_logprobs_M, atol=1e-5, rtol=0)


def test_reference(sampler: tinker.SamplingClient, requested: list[int | None]) -> None:
    def no_trainer() -> tinker.TrainingClient:
        raise AssertionError("a sampler can score these datums")

    batch = packed()
    whole = Reference(sampler, no_trainer, "base")
    last = Reference(sampler, no_trainer, "base", can_score_last_n=True)
    with open_workers():
        expected_DT, scores_DT = whole.logprobs(batch, 0), last.logprobs(batch, 0)
        torch.testing.assert_close(scores_DT[batch.mask_DT], expected_DT[batch.mask_DT], atol=1e-5, rtol=0)
        first_part = scores_DT[: len(WEIGHTS[0]) - 1 + 2]
        assert first_part.tolist()[-2:] == [0.0, 0.0]
        assert whole.take_sampled(0) == last.take_sampled(0)
        # Cached scores of whole sequences are not requested again.
        num_requests = len(requested)
        resumed = Reference(sampler, no_trainer, "base", can_score_last_n=True)
        resumed.cache = whole.cache
        assert torch.equal(resumed.logprobs(batch, 0), expected_DT)
        assert torch.equal(last.logprobs(batch, 1), scores_DT)
        assert len(requested) == num_requests


def test_service_that_does_not_know_the_option(sampler: tinker.SamplingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports_last_n(sampler)
    send = tinker.SamplingClient._send_asample_request
    monkeypatch.setattr(
        tinker.SamplingClient, "_send_asample_request", lambda client, *args: send(client, *args[:-1], None)
    )
    assert not supports_last_n(sampler)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    assert None not in sampler.compute_logprobs(prompt).result()[1:]

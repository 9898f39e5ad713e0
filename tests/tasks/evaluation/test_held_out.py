"""Metrics of held-out data against tinker-cookbook's and plain torch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.evaluation.evaluators import HeldOutNLL
from tasks.training.held_out import GradedMetrics

ANSWERS = ("4", "It is four, which is two and two.", "Vier – größer als drei, kleiner als fünf. " * 4)


class OneBatch(SupervisedDataset):
    def __init__(self, datums: list[tinker.Datum]) -> None:
        self.datums = datums

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self.datums

    def __len__(self) -> int:
        return 1


def open_client(engine_url: str) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    return service.create_lora_training_client("tiny", rank=1).result()


def datums_of(tokenizer: Tokenizer, **options: Any) -> list[tinker.Datum]:
    """Each answer to one question as a datum."""
    renderer = get_renderer("qwen3_instruct", tokenizer)
    return [
        conversation_to_datum(
            [Message(role="user", content="2 + 2?"), Message(role="assistant", content=answer)],
            renderer,
            max_length=None,
            **options,
        )
        for answer in ANSWERS
    ]


def test_metrics_of_examples_of_different_lengths(engine_url: str) -> None:
    """Weights are normalized per example, and each answer ends with a special token."""
    client = open_client(engine_url)
    tokenizer = client.get_tokenizer()
    datums = datums_of(tokenizer, reduction="mean")
    assert [float(datum.loss_fn_inputs["weights"].to_torch().sum()) for datum in datums] == pytest.approx([1.0] * 3)
    held_out = HeldOutNLL(OneBatch(datums), tokenizer)
    sampler = client.save_weights_and_get_sampling_client().result()
    theirs = asyncio.run(SamplerNLLEvaluator(datums, tokenizer=tokenizer)(sampler))
    outputs = client.forward(datums, "cross_entropy").result().loss_fn_outputs
    trained = [
        output["logprobs"].to_torch()[datum.loss_fn_inputs["weights"].to_torch() > 0]
        for output, datum in zip(outputs, datums, strict=True)
    ]
    expected = {
        "test/nll": theirs["test/nll"],
        "test/bits_per_byte": theirs["test/bpb"],
        "test/nll_per_token": -float(torch.cat(trained).mean()),
    }
    assert expected["test/nll_per_token"] != pytest.approx(expected["test/nll"], rel=1e-3)
    measured = asyncio.run(held_out(client))
    assert measured == pytest.approx(expected, rel=1e-4)
    assert isinstance(measured, GradedMetrics)
    # Each answer's weights add up to 1, so its score is its own mean.
    assert measured.scores["test/nll"] == pytest.approx([-float(logprobs.mean()) for logprobs in trained], rel=1e-4)
    assert asyncio.run(held_out.measure_sampler(sampler)) == pytest.approx(expected, rel=1e-4)


def test_scores_of_unequal_weights_average_to_the_metric(engine_url: str) -> None:
    """Long answers weigh more, and other data has another digest."""
    client = open_client(engine_url)
    tokenizer = client.get_tokenizer()
    datums = datums_of(tokenizer)
    measured = [asyncio.run(HeldOutNLL(OneBatch(rows), tokenizer)(client)) for rows in (datums, datums[:2], datums)]
    assert all(isinstance(metrics, GradedMetrics) for metrics in measured)
    first, fewer, again = measured
    assert sum(first.scores["test/nll"]) / 3 == pytest.approx(first["test/nll"])  # pyright: ignore[reportAttributeAccessIssue]
    many = HeldOutNLL(OneBatch(datums * 80), tokenizer)
    scores = asyncio.run(many(client)).scores["test/nll"]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(scores) == 200
    assert sum(scores) / 200 == pytest.approx(first["test/nll"], rel=1e-5)
    assert first.problems == again.problems != fewer.problems  # pyright: ignore[reportAttributeAccessIssue]

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
    # Each answer's weights add up to 1, so its score is its own mean.
    assert measured.scores["test/nll"] == pytest.approx([-float(logprobs.mean()) for logprobs in trained], rel=1e-4)
    assert asyncio.run(held_out.measure_sampler(sampler)) == pytest.approx(expected, rel=1e-4)


def measure(client: tinker.TrainingClient, datums: list[tinker.Datum]) -> GradedMetrics:
    return asyncio.run(HeldOutNLL(OneBatch(datums), client.get_tokenizer())(client))


def test_scores_average_to_the_metrics(engine_url: str) -> None:
    """Long answers weigh more, and other data has another digest."""
    client = open_client(engine_url)
    datums = datums_of(client.get_tokenizer())
    first, fewer, again = (measure(client, rows) for rows in (datums, datums[:2], datums))
    assert first.problems == again.problems != fewer.problems
    many = measure(client, datums * 80)
    assert set(first) == set(first.scores) == set(HeldOutNLL.scored_metrics)
    for metrics, num_scores in ((first, 3), (many, 200)):
        assert {name: len(scores) for name, scores in metrics.scores.items()} == dict.fromkeys(metrics, num_scores)
        means = {name: sum(scores) / num_scores for name, scores in metrics.scores.items()}
        assert means == pytest.approx(dict(first), rel=1e-5)


def test_score_is_the_effect_of_one_more_datum(engine_url: str) -> None:
    """With many datums, one more copy of a datum changes a metric by the datum's distance from it, divided by them."""
    client = open_client(engine_url)
    datums = datums_of(client.get_tokenizer()) * 60
    metrics = measure(client, datums)
    for index in range(len(ANSWERS)):
        with_copy = measure(client, [*datums, datums[index]])
        for name in metrics:
            effect = len(datums) * (with_copy[name] - metrics[name])
            assert metrics.scores[name][index] - metrics[name] == pytest.approx(effect, rel=0.03), name

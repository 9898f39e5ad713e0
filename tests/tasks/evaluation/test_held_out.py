"""Metrics of held-out data against tinker-cookbook's and plain torch."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
import tinker
import torch
from engine_process import API_KEY
from scipy import stats
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.supervised.common import compute_bpb, compute_mean_nll
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.evaluation.evaluators import HeldOutNLL, _scores
from tasks.evaluation.intervals import sign_flip_p_value
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


def test_score_is_the_share_of_a_datum(engine_url: str) -> None:
    """Reference: tinker-cookbook's metrics if only this datum has a loss."""
    client = open_client(engine_url)
    tokenizer = client.get_tokenizer()
    datums = datums_of(tokenizer)
    logprobs = [output["logprobs"] for output in client.forward(datums, "cross_entropy").result().loss_fn_outputs]
    weights = [datum.loss_fn_inputs["weights"] for datum in datums]
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in datums]
    scores = measure(client, datums).scores
    for index in range(len(ANSWERS)):
        alone = [
            values if number == index else tinker.TensorData.from_torch(torch.zeros_like(values.to_torch()))
            for number, values in enumerate(logprobs)
        ]
        assert scores["test/nll"][index] == pytest.approx(3 * compute_mean_nll(alone, weights), rel=1e-5)
        bits_per_byte = compute_bpb(alone, weights, targets, tokenizer)
        assert scores["test/bits_per_byte"][index] == pytest.approx(3 * bits_per_byte, rel=1e-5)


def test_data_with_several_targets_has_one_score() -> None:
    inputs = {"target_tokens": tinker.TensorData.from_torch(torch.ones(2, 3).long())}
    inputs["weights"] = tinker.TensorData.from_torch(torch.ones(2, 3))
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    assert HeldOutNLL(OneBatch([datum]), cast(Any, None)).scored_metrics == ("test/nll",)


def test_equal_weights_rarely_differ_significantly() -> None:
    """1,000 pairs of equal weights on examples of uneven sizes: at most 5 %, within the binomial bound of 0.1 %."""
    generator, num_runs, num_significant = np.random.default_rng(0), 1000, 0
    for _ in range(num_runs):
        sizes_D = np.exp(1.5 * generator.standard_normal(6))
        one, other = (_scores((sizes_D * (1 + generator.standard_normal(6))).tolist(), sizes_D.tolist()) for _ in "ab")
        num_significant += sign_flip_p_value([a - b for a, b in zip(one, other, strict=True)], 0.05) <= 0.05
    assert num_significant <= stats.binom.ppf(0.999, num_runs, 0.05)

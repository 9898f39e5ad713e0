"""Metrics of held-out data against tinker-cookbook's and plain torch."""

from __future__ import annotations

import asyncio
import pickle
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

from blocks.errors import PoisonedError
from tasks.evaluation.evaluators import HeldOutNLL, _input_with_last_target, _Text
from tasks.evaluation.intervals import sign_flip_p_value
from tasks.reports.tables import Estimate
from tasks.training.held_out import BatchValues, GradedMetrics

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
    """Each answer to a question of its own as a datum."""
    renderer = get_renderer("qwen3_instruct", tokenizer)
    return [
        conversation_to_datum(
            [Message(role="user", content=f"{number} + 2?"), Message(role="assistant", content=answer)],
            renderer,
            max_length=None,
            **options,
        )
        for number, answer in enumerate(ANSWERS)
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


def values_of(metrics: GradedMetrics, name: str) -> BatchValues:
    return BatchValues(metrics.scores[name], metrics.sizes[name], metrics.problems, [*metrics.groups])


def test_scores_average_to_the_metrics(engine_url: str) -> None:
    """Long answers weigh more, other data has another digest, and equal prompts are one sample."""
    client = open_client(engine_url)
    datums = datums_of(client.get_tokenizer())
    first, fewer, again = (measure(client, rows) for rows in (datums, datums[:2], datums))
    assert first.problems == again.problems != fewer.problems
    twice, many = measure(client, datums * 2), measure(client, datums * 80)
    assert set(first) == set(first.scores) == set(HeldOutNLL.scored_metrics)
    for metrics, num_scores in ((first, 3), (twice, 6), (many, 3)):
        for name in metrics:
            values = values_of(metrics, name)
            assert len(values.values_B) == num_scores
            assert values.num_samples == 3
            assert values.mean() == pytest.approx((first[name], values_of(first, name).mean()[1]), rel=1e-5)
            assert sum(values.weighted_S) / 3 == pytest.approx(first[name], rel=1e-5)


def test_score_is_the_metric_of_a_datum(engine_url: str) -> None:
    """Reference: tinker-cookbook's metrics if only this datum has a loss."""
    client = open_client(engine_url)
    tokenizer = client.get_tokenizer()
    datums = datums_of(tokenizer)
    logprobs = [output["logprobs"] for output in client.forward(datums, "cross_entropy").result().loss_fn_outputs]
    weights = [datum.loss_fn_inputs["weights"] for datum in datums]
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in datums]
    scores = measure(client, datums).scores
    for index in range(len(ANSWERS)):
        alone = [[values[index]] for values in (logprobs, weights, targets)]
        assert scores["test/nll"][index] == pytest.approx(compute_mean_nll(alone[0], alone[1]), rel=1e-5)
        assert scores["test/bits_per_byte"][index] == pytest.approx(compute_bpb(*alone, tokenizer), rel=1e-5)


def weighted(datum: tinker.Datum, factor: float) -> tinker.Datum:
    """Return a datum with its weights multiplied by a factor."""
    weights = factor * datum.loss_fn_inputs["weights"].to_torch()
    inputs = {**datum.loss_fn_inputs, "weights": tinker.TensorData.from_torch(weights)}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def test_weights_that_cancel_have_no_mean(engine_url: str) -> None:
    """Positive and negative weights add up to 0; tokens of positive weight still have their own mean."""
    client = open_client(engine_url)
    (datum, other, _) = datums_of(client.get_tokenizer())
    balanced = [datum, weighted(datum, -1.0)]
    held_out = HeldOutNLL(OneBatch(balanced), client.get_tokenizer())
    assert held_out.num_untrained == 0
    measured, alone = asyncio.run(held_out(client)), measure(client, [datum])
    assert "test/nll" not in measured
    assert measured["test/nll_per_token"] == pytest.approx(alone["test/nll_per_token"], rel=1e-5)
    with pytest.raises(PoisonedError, match="check its rows and the weights"):
        measure(client, [weighted(datum, 0.0)])
    negative = measure(client, [weighted(other, -1.0)])
    assert negative == pytest.approx({"test/nll": measure(client, [other])["test/nll"]}, rel=1e-5)


def test_rows_without_trained_tokens_are_no_samples(engine_url: str) -> None:
    client = open_client(engine_url)
    datums = datums_of(client.get_tokenizer())
    untrained = datums_of(client.get_tokenizer())[0]
    untrained.loss_fn_inputs["weights"] = tinker.TensorData.from_torch(
        torch.zeros_like(untrained.loss_fn_inputs["weights"].to_torch())
    )
    without, with_row = measure(client, datums), measure(client, [*datums, untrained])
    for name in without:
        assert values_of(with_row, name).mean() == pytest.approx(values_of(without, name).mean(), rel=1e-6)
        assert values_of(with_row, name).weighted_S == pytest.approx(values_of(without, name).weighted_S, rel=1e-6)


def test_data_with_several_targets_has_one_score() -> None:
    inputs = {"target_tokens": tinker.TensorData.from_torch(torch.ones(2, 3).long())}
    inputs["weights"] = tinker.TensorData.from_torch(torch.ones(2, 3))
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    assert HeldOutNLL(OneBatch([datum]), cast(Any, None)).scored_metrics == ("test/nll",)


def test_a_sampler_scores_data_with_images() -> None:
    chunks = [tinker.types.ImageChunk(data=b"", format="png", expected_tokens=2), tinker.EncodedTextChunk(tokens=[7])]
    inputs = {"target_tokens": tinker.TensorData.from_torch(torch.tensor([0, 7, 8]))}
    inputs["weights"] = tinker.TensorData.from_torch(torch.tensor([0.0, 0.0, 1.0]))
    datum = tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    whole = _input_with_last_target(datum)
    assert (whole.chunks[:2], whole.chunks[2].length, whole.length) == (chunks, 1, 4)


def test_two_answers_to_a_prompt_are_one_sample(engine_url: str) -> None:
    """Two datums of each prompt give the interval of their sums: the second is no further evidence."""
    client = open_client(engine_url)
    datums = datums_of(client.get_tokenizer())
    copies = measure(client, [datum for datum in datums for _ in "ab"])
    assert [*copies.groups] == [0, 0, 1, 1, 2, 2]
    assert values_of(copies, "test/nll").mean() == pytest.approx(values_of(measure(client, datums), "test/nll").mean())


def of_weights(rows: list[tuple[list[int], list[float]]]) -> HeldOutNLL:
    """Held-out data of rows of tokens and the weights of their targets."""
    datums = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_torch(torch.tensor(tokens[1:])),
                "weights": tinker.TensorData.from_torch(torch.tensor(weights)),
            },
        )
        for tokens, weights in rows
    ]
    return HeldOutNLL(OneBatch(datums), cast(Any, None))


def test_rows_without_a_prompt_of_their_own_are_samples() -> None:
    """Plain text has no prompt, and a single prompt says nothing about which rows are alike."""
    texts = [([5, 6, 7 + row], [1.0, 1.0]) for row in range(4)]
    answers = [([5, 6, 7 + row], [0.0, 1.0]) for row in range(4)]
    other = [([5, 9, 7], [0.0, 1.0])]
    assert of_weights(texts)._prompts_D == [0, 1, 2, 3]
    assert of_weights(answers)._prompts_D == [0, 1, 2, 3]
    assert of_weights(answers + other)._prompts_D == [0, 0, 0, 0, 1]
    assert of_weights(texts + answers + other)._prompts_D == [0, 1, 2, 3, 4, 4, 4, 4, 5]


def test_many_prompts_are_scored_in_groups() -> None:
    """Each of 200 groups of 250 prompts with two answers has the mean of its tokens."""
    held_out = of_weights(
        [([5, 300 + prompt, 7, 8 + answer], [0.0, 1.0, 1.0]) for prompt in range(250) for answer in (0, 1)]
    )
    generator = torch.Generator().manual_seed(0)
    logprobs_D = [-torch.rand(3, generator=generator) for _ in range(500)]
    held_out._texts_D = [_Text(torch.zeros(3, dtype=torch.bool), 0)] * 500
    metrics = held_out._metrics([tinker.TensorData.from_torch(logprobs) for logprobs in logprobs_D])
    values = values_of(metrics, "test/nll_per_token")
    assert len(values.values_B) == values.num_samples == 200
    assert sum(values.num_datums_B) == 1000
    expected = -float(torch.stack(logprobs_D)[:, 1:].mean())
    assert values.mean()[0] == pytest.approx(expected)
    assert metrics["test/nll_per_token"] == pytest.approx(expected)
    # The first group has the prompts 0 and 1, because 250 prompts are more than 200 groups.
    assert values.values_B[0] == pytest.approx(-float(torch.stack(logprobs_D[:4])[:, 1:].mean()))


def test_metrics_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(GradedMetrics({"a": 1.0}, {"a": [1.0]}))).scores == {"a": [1.0]}


def test_equal_weights_rarely_differ_significantly() -> None:
    """1,000 pairs of equal weights on examples of uneven sizes: at most 5 %, within the binomial bound of 0.1 %."""
    generator, num_runs, num_significant = np.random.default_rng(0), 1000, 0
    for _ in range(num_runs):
        sizes_D = np.exp(1.5 * generator.standard_normal(6)).tolist()
        one, other = (BatchValues((1 + generator.standard_normal(6)).tolist(), sizes_D) for _ in "ab")
        num_significant += sign_flip_p_value(one.minus(other).weighted_S, 0.05) <= 0.05
    assert num_significant <= stats.binom.ppf(0.999, num_runs, 0.05)


@pytest.mark.parametrize("difference", [0.0, 5.0])
def test_intervals_cover_the_difference(difference: float) -> None:
    """2,000 differences on 16 examples of uneven sizes: nine in ten intervals, which are as narrow as the noise."""
    generator, num_covered, widths = np.random.default_rng(0), 0, []
    for _ in range(2000):
        sizes_D = np.exp(generator.standard_normal(16))
        values = BatchValues((difference + generator.standard_normal(16)).tolist(), sizes_D.tolist())
        estimate = Estimate.of(values)
        num_covered += abs(estimate.value - difference) <= estimate.half_width
        widths.append(estimate.half_width)
    assert 0.9 <= num_covered / 2000 <= 0.97
    # The true standard deviation of the mean is 0.38 on average, so an interval of normal quantiles has 0.74.
    assert np.median(widths) < 0.74

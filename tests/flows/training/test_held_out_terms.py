"""Values of terms on held-out data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
import torch
from metric_history import history
from mlflow import MlflowClient
from sft_config import sft_fields
from tinker_cookbook.supervised.types import SupervisedDataset

from blocks.files.local_directory import LocalDirectory
from examples.gsm8k import Gsm8kBuilder
from flows.config.train import SftConfig
from flows.estimates.supervised import estimate
from flows.sft import sft
from objectives.batch import Batch, Outputs
from objectives.labels import get_label
from objectives.term import regularizer
from tasks.supervised.dataset import build_dataset
from tasks.training.held_out import read_batch_values

pytestmark = pytest.mark.usefixtures("prefect_server")

TEXTS: list[Sequence[str]] = []


@regularizer("test_characters", "scored")
def characters(outputs: Outputs, batch: Batch) -> torch.Tensor:
    TEXTS.append(batch.texts_D)
    return torch.tensor([float(len(text)) for text in batch.texts_D]) / 100


@regularizer("test_needs_a_label")
def needs_a_label(outputs: Outputs, batch: Batch) -> torch.Tensor:
    get_label(batch, "only_in_training_data")
    return outputs.logprobs_DT


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    TEXTS.clear()


def fields(folder: Path, run_name: str, mlflow_uri: str, engine_url: str, **changes: Any) -> SftConfig:
    config = sft_fields(folder, run_name, mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 2}
    return SftConfig.model_validate(config | changes)


def test_values_on_held_out_data_are_those_of_plain_torch(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    terms = [{"name": "test_characters", "weight": 0.1}, {"name": "confidence", "weight": 0.1}]
    config = fields(tmp_path, "held-out", mlflow_uri, engine_url, objective={"regularizers": terms})
    result = sft(config)
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    trained = service.create_training_client_from_state(result.state_path).result()
    tokenizer = trained.get_tokenizer()
    source = build_dataset(config.data.builder, config.data.params, tokenizer, config.seed)
    assert source.test is not None
    expected: dict[str, list[float]] = {"test_characters": [], "confidence": []}
    for index in range(len(source.test)):
        datums = source.test.get_batch(index)
        outputs = trained.forward(datums, "cross_entropy").result().loss_fn_outputs
        masks = [datum.loss_fn_inputs["weights"].to_torch() > 0 for datum in datums]
        logprobs = [output["logprobs"].to_torch()[mask] for output, mask in zip(outputs, masks, strict=True)]
        # Each problem has two solutions in a row, between which the model chooses by their probability.
        risks = []
        for first in range(0, len(datums), 2):
            weights = torch.stack([logprobs[first].sum(), logprobs[first + 1].sum()]).softmax(0)
            texts = [
                tokenizer.decode(datum.loss_fn_inputs["target_tokens"].to_torch()[mask].tolist())
                for datum, mask in zip(datums[first : first + 2], masks[first : first + 2], strict=True)
            ]
            risks.append(float(weights @ torch.tensor([len(str(text)) / 100 for text in texts])))
        expected["test_characters"].append(statistics.mean(risks))
        trained_tokens = torch.cat(logprobs)
        expected["confidence"].append(float((trained_tokens.exp() * trained_tokens).mean()))
    assert len(expected["confidence"]) == 8
    for name, value_B in expected.items():
        values, errors = (history(result, f"test/term/{name}/{field}") for field in ("value", "stderr"))
        assert set(values) == {0, 2}
        assert values[2] == pytest.approx(statistics.mean(value_B), rel=1e-4)
        assert errors[2] == pytest.approx(statistics.stdev(value_B) / math.sqrt(8), rel=1e-3)
        assert values[0] != values[2]


def test_terms_on_candidates_are_measured_on_samples(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    config = fields(
        tmp_path,
        "samples",
        mlflow_uri,
        engine_url,
        objective={"regularizers": [{"name": "test_characters", "weight": 0.1}]},
        candidates={"num": 2, "max_tokens": 12, "every": 10},
    ).model_dump()
    config["data"]["params"]["contrast"] = False
    result = sft(SftConfig.model_validate(config))
    held_out = [texts for texts in TEXTS if len(texts) == 2]  # two prompts per batch, one sample each
    training = [texts for texts in TEXTS if len(texts) == 4]
    assert (len(held_out), len(training)) == (16, 1)
    for step, batches in ((0, held_out[:8]), (2, held_out[8:])):
        lengths = [len(text) / 100 for texts in batches for text in texts]
        assert history(result, "test/term/test_characters/value")[step] == pytest.approx(statistics.mean(lengths))
    stored = read_batch_values(LocalDirectory(Path(result.directory)))
    assert stored[0]["test_characters"].is_paired_with(stored[2]["test_characters"])
    assert stored[0]["test_characters"].digest
    # Two evaluations of 16 problems, and the candidates of step 0: two for each of two problems.
    num_sampled = history(result, "cost/num_sample_tokens")
    assert 12 * 4 < max(num_sampled.values()) <= 12 * (2 * 16 + 4)
    assert estimate(SftConfig.model_validate(config)).candidates.num_sample_tokens == 12 * (2 * 16 + 4)


class LabeledDataset(SupervisedDataset):
    """Dataset whose datums have a label."""

    def __init__(self, dataset: SupervisedDataset) -> None:
        self._dataset = dataset

    def get_batch(self, index: int) -> list[tinker.Datum]:
        label = {"label:only_in_training_data": tinker.TensorData(data=[1], dtype="int64", shape=[1])}
        datums = self._dataset.get_batch(index)
        return [replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **label}) for datum in datums]

    def set_epoch(self, seed: int = 0) -> None:
        self._dataset.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._dataset)


@chz.chz
class LabeledBuilder(Gsm8kBuilder):
    """GSM8K with labels on the training data alone, and one solution of each held-out problem."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        train, _ = super().__call__()
        _, test = Gsm8kBuilder(common_config=self.common_config)()
        return LabeledDataset(train), test


def test_terms_without_a_value_on_held_out_data_are_reported(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Neither missing labels nor one completion per prompt end the run."""
    names = ("test_needs_a_label", "test_characters", "confidence")
    terms = [{"name": name, "weight": 0.1} for name in names]
    config = fields(tmp_path, "reported", mlflow_uri, engine_url, objective={"regularizers": terms}).model_dump()
    config["data"]["builder"] = "test_held_out_terms:LabeledBuilder"
    result = sft(SftConfig.model_validate(config))
    assert set(history(result, "test/term/confidence/value")) == {0, 2}
    assert not history(result, "test/term/test_needs_a_label/value")
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    reasons = {name: tags.get(f"tinker_flows.warning.held_out.{name}", "") for name in names}
    assert "the data has no label 'only_in_training_data'" in reasons["test_needs_a_label"]
    assert "every prompt has one completion there" in reasons["test_characters"]
    assert not reasons["confidence"]


def test_rows_without_a_trained_token_warn(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """max_length cuts off the answers of the longest held-out problems."""
    config = fields(tmp_path, "cut-off", mlflow_uri, engine_url, num_steps=1, eval_every=1)
    config.data.params["common_config"]["max_length"] = 300
    result = sft(config)
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()
    test = build_dataset(config.data.builder, config.data.params, tokenizer, config.seed).test
    assert test is not None
    rows = [datum.loss_fn_inputs["weights"].data for index in range(len(test)) for datum in test.get_batch(index)]
    num_untrained = sum(not any(weights) for weights in rows)
    assert num_untrained
    expected = f"{num_untrained} of {len(rows)} held-out rows have no trained token and do not count: raise max_length"
    assert [warning for warning in result.warnings if warning.startswith(expected)]

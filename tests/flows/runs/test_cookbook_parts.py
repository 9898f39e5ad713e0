"""Unmodified builders and evaluators of tinker-cookbook, by import path and parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import tinker
from sft_config import sft_fields
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from flows.config.train import SftConfig
from flows.sft import sft
from tasks.common.builders import build
from tasks.distillation.mixture import Mixture
from tasks.supervised.dataset import build_dataset, open_datasets

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")
PARAMS = {
    "test_size": 4,
    "common_config": {
        "renderer_name": "qwen3_instruct",
        "max_length": 128,
        "batch_size": 4,
        "train_on_what": "last_assistant_message",
    },
}


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.jsonl"
    talks = [[("user", f"What is {n} + {n}?"), ("assistant", f"It is {n + n}.")] for n in range(20)]
    rows = ({"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class HeldOutByTheSampler(SamplerNLLEvaluator):
    """Build a cookbook evaluator on a conversation file."""

    def __init__(self, path: str, tokenizer_name: str) -> None:
        builder = FromConversationFileBuilder(
            file_path=path,
            test_size=4,
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=tokenizer_name,
                renderer_name="qwen3_instruct",
                max_length=128,
                batch_size=4,
            ),
        )
        _, test = builder()
        assert test is not None
        super().__init__(test.get_batch(0), name="sampler")


def test_builder_and_evaluator(conversations: Path, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    fields = sft_fields(tmp_path, "cookbook", mlflow_uri, engine_url) | {
        "data": {"builder": builder, "params": PARAMS | {"file_path": str(conversations)}},
        "evaluators": [
            {
                "builder": "test_cookbook_parts:HeldOutByTheSampler",
                "params": {"path": str(conversations), "tokenizer_name": tokenizer.name_or_path},
            }
        ],
        "num_epochs": 2,
        "eval_every": 100,
    }
    result = sft(SftConfig.model_validate(fields))
    assert result.num_steps == 8
    # The forward pass of the training client equals the sampler's compute_logprobs.
    assert result.metrics["sampler/nll"] == pytest.approx(result.metrics["test/nll"], abs=1e-4)


def test_batches_are_a_function_of_the_step(conversations: Path, engine_url: str) -> None:
    """Each step has the batch of tinker-cookbook's loop, regardless of the order of requests."""
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()
    params = PARAMS | {"file_path": str(conversations)}
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    straight = build_dataset(builder, params, tokenizer, seed=0)
    per_epoch = len(straight.train)
    expected = [straight.batch_at(step).texts_D for step in range(2 * per_epoch)]
    resumed = build_dataset(builder, params, tokenizer, seed=0)
    assert [resumed.batch_at(step).texts_D for step in range(3, 2 * per_epoch)] == expected[3:]

    theirs = build_dataset(builder, params, tokenizer, seed=0).train
    for epoch in range(2):
        theirs.set_epoch(seed=epoch)
        for index in range(per_epoch):
            ours = list(resumed.batch_at(epoch * per_epoch + index).datums)
            assert [d.loss_fn_inputs["target_tokens"].tolist() for d in ours] == [
                d.loss_fn_inputs["target_tokens"].tolist() for d in theirs.get_batch(index)
            ]


def test_comparisons_in_random_order(engine_url: str) -> None:
    """A random generator that all rows share gives each step, and the held-out data, the order of the cookbook's loop.

    Its loop reads the held-out data first; the order of the answers of a row depends on the number of rows read before.
    """
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()

    def texts(datums: Iterable[tinker.Datum]) -> list[str]:
        return [str(tokenizer.decode(datum.model_input.to_ints())) for datum in datums]

    builder = "tinker_cookbook.preference.preference_datasets:ChatDatasetBuilderFromComparisons"
    data = Path(__file__).parents[3] / "examples" / "data"
    params = {
        "comparison_builder": "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl",
        "comparison_builder.train_path": str(data / "preferences_train.jsonl"),
        "comparison_builder.test_path": str(data / "preferences_test.jsonl"),
        "common_config": {"renderer_name": "role_colon", "max_length": 256, "batch_size": 8},
    }
    theirs, their_test = build("data", builder, params, tokenizer, lambda instance: instance())
    expected_test = texts(their_test.get_batch(0))
    per_epoch, expected = len(theirs), []
    for epoch in range(2):
        theirs.set_epoch(seed=epoch)
        expected += [texts(theirs.get_batch(index)) for index in range(per_epoch)]

    straight = build_dataset(builder, params, tokenizer, seed=0)
    straight.untrained_steps(range(2 * per_epoch))
    resumed = build_dataset(builder, params, tokenizer, seed=0)
    first = per_epoch + 1
    assert straight.test is not None
    assert texts(straight.test.get_batch(0)) == expected_test
    assert [texts(straight.batch_at(step).datums) for step in range(2 * per_epoch)] == expected
    assert [texts(resumed.batch_at(step).datums) for step in range(first, 2 * per_epoch)] == expected[first:]
    assert texts(resumed.batch_at(first).datums) == expected[first]

    (train, test), (train_again, _) = (open_datasets(builder, params, tokenizer, seed=0) for _ in range(2))
    mixture, resumed_mixture = (Mixture[tinker.Datum]([dataset], [1.0], 8, seed=0) for dataset in (train, train_again))
    assert test is not None
    assert texts(test.get_batch(0)) == expected_test
    for step, batch in enumerate(expected):
        assert texts(item.value for item in mixture.at(step)) == batch
    assert texts(item.value for item in resumed_mixture.at(first)) == expected[first]


def test_weights_follow_train_on_what(conversations: Path, engine_url: str) -> None:
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()
    params = PARAMS | {"file_path": str(conversations)}
    source = build_dataset("tinker_cookbook.supervised.data:FromConversationFileBuilder", params, tokenizer, seed=0)
    batch = source.batch_at(0)
    assert all(text.startswith("It is ") for text in batch.texts_D)
    assert float(batch.weights_DT.sum()) == pytest.approx(batch.num_datums)  # the cookbook's mean per example

"""Comparison builders that use the service of the run, in runs and estimates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
from dpo_config import dpo_fields
from engine_process import API_KEY
from sft_config import sft_fields
from tinker import types
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import get_tokenizer

from blocks.errors import ConfigError
from blocks.servers.processes import free_port
from flows.config.dpo import DpoConfig
from flows.config.train import SftConfig
from flows.dpo import dpo
from flows.estimates.supervised import estimate
from flows.evaluate import EvaluateConfig, evaluate
from flows.sft import sft
from tasks.training.token_meter import TokenMeter

pytestmark = pytest.mark.usefixtures("prefect_server")


@chz.chz
class SampledComparisons(ComparisonBuilderFromJsonl):
    """Comparisons of a builder that needs the service twice: by the session of the run, and by a client of its own."""

    base_model: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)

    def get_train_and_test_datasets(self) -> tuple[object, object]:  # pyright: ignore[reportIncompatibleMethodOverride]
        prompt = types.ModelInput.from_ints(get_tokenizer(self.base_model).encode("a"))
        for service in (self.session, tinker.ServiceClient()):
            sampler = service.create_sampling_client(base_model=self.base_model).result()
            assert sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result().sequences
        return super().get_train_and_test_datasets()


def test_comparison_builders_reach_the_service_of_the_run(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{free_port()}")  # another service, which does not respond
    fields: dict[str, Any] = dpo_fields(tmp_path, "sampled", mlflow_uri, engine_url) | {"num_steps": 1, "eval_every": 0}
    fields["comparisons"] = {"builder": f"{__name__}:SampledComparisons", "params": fields["comparisons"]["params"]}
    config = DpoConfig.model_validate(fields)
    estimated = estimate(config)
    assert not (tmp_path / "runs").exists(), "the builder takes no directory, so none is opened"
    assert dpo(config).metrics["num_tokens"] == estimated.num_tokens


def test_ranking_evaluators_reach_the_service_of_the_run(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run, which adds its own resources, and in the flow `evaluate`."""
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{free_port()}")
    pairs = dpo_fields(tmp_path, "unused", mlflow_uri, engine_url)["comparisons"]["params"]
    ranking = {"builder": f"{__name__}:SampledComparisons", "params": pairs, "model": "tiny"}
    evaluators = [{"builder": "tasks.preference.ranking_evaluator:RankingEvaluator", "params": ranking}]
    fields: dict[str, Any] = sft_fields(tmp_path, "ranked", mlflow_uri, engine_url)
    result = sft(SftConfig.model_validate(fields | {"num_steps": 1, "eval_every": 1, "evaluators": evaluators}))
    assert 0 <= result.metrics["test/accuracy"] <= 1
    shared = {key: fields[key] for key in ("base_url", "storage", "tracking")}
    config = {"run_name": "ranked-again", "checkpoint": "ranked@final", "evaluators": evaluators, **shared}
    assert evaluate(EvaluateConfig.model_validate(config)).metrics["test/accuracy"] == result.metrics["test/accuracy"]


@chz.chz
class MeteredRows(FromConversationFileBuilder):
    """Conversations of a builder that samples five tokens with the meter."""

    base_model: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    token_meter: TokenMeter = chz.field(meta_factory=None)

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        sampler = self.session.create_sampling_client(base_model=self.base_model).result()
        self.token_meter.watch(sampler, self.base_model)
        prompt = types.ModelInput.from_ints(get_tokenizer(self.base_model).encode("a"))
        sampler.sample(prompt, 5, types.SamplingParams(max_tokens=1, stop=[])).result()
        return super().__call__()


def test_tokens_that_a_builder_samples_are_counted_in_an_evaluation(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    params = {
        "file_path": "examples/data/sums.jsonl",
        "test_size": 8,
        "common_config": {"max_length": 256, "batch_size": 8, "renderer_name": "qwen3_instruct"},
    }
    config = {
        "run_name": "metered",
        "model": "tiny",
        "checkpoint": "base",
        "base_url": engine_url,
        "storage": str(tmp_path / "runs"),
        "tracking": mlflow_uri,
        "data": {"builder": f"{__name__}:MeteredRows", "params": params},
    }
    assert evaluate(EvaluateConfig.model_validate(config)).cost["cost/num_sample_tokens"] == 5


def test_estimate_without_a_key_names_the_builder_that_needs_the_service(
    tmp_path: Path, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    fields: dict[str, Any] = dpo_fields(tmp_path, "keyless", mlflow_uri, "") | {"model": "Qwen/Qwen3-8B"}
    fields["comparisons"] = {"builder": f"{__name__}:SampledComparisons", "params": fields["comparisons"]["params"]}
    with pytest.raises(ConfigError, match=r"TINKER_API_KEY is missing, and .*SampledComparisons uses the service"):
        estimate(DpoConfig.model_validate(fields))

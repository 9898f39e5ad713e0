"""Evaluators that open a client of their own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import tinker
from mlflow import MlflowClient
from sft_config import sft_fields
from tinker import types
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.tokenizer_utils import get_tokenizer

from flows.config.train import SftConfig
from flows.evaluate import EvaluateConfig, evaluate
from flows.sft import sft


class OwnGrader(SamplingClientEvaluator):
    """Evaluator whose constructor opens a client, and a tokenizer by name."""

    def __init__(self, tokenizer: str | None = None) -> None:
        self.client = tinker.ServiceClient()
        self.tokens = get_tokenizer(tokenizer).encode("Grade this.") if tokenizer else [1, 2]

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        grader = await self.client.create_sampling_client(base_model="tiny")
        response = await grader.sample(types.ModelInput.from_ints(self.tokens), 1, types.SamplingParams(max_tokens=1))
        return {"graded": float(len(response.sequences))}


def test_evaluators_reach_the_service_of_the_run(
    tmp_path: Path, prefect_server: str, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment names another service, which does not respond."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("TINKER_API_KEY", "tml-test")
        evaluators = [{"builder": f"{__name__}:OwnGrader"}]
        fields = sft_fields(tmp_path, "graded", mlflow_uri, engine_url) | {"num_steps": 1, "eval_every": 1}
        named = [evaluators[0] | {"params": {"tokenizer": "tiny"}}]
        result = sft(SftConfig.model_validate(fields | {"evaluators": named}))
        assert result.metrics["graded"] == 1.0
        shared = {key: fields[key] for key in ("base_url", "storage", "tracking")}
        config = {"run_name": "graded-again", "checkpoint": "graded@final", "evaluators": evaluators, **shared}
        assert evaluate(EvaluateConfig.model_validate(config)).metrics["graded"] == 1.0


class Grade(SamplingClientEvaluator):
    """Evaluator that returns a string and a number, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        if self.fails:
            raise ValueError("no grade today")
        return {"grade": "B+", "points": 7.0}  # pyright: ignore[reportReturnType]


def test_a_run_tags_strings_and_skips_evaluators_that_fail(
    tmp_path: Path, prefect_server: str, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    entry = {"builder": f"{__name__}:Grade"}
    evaluators = [entry | {"params": {"fails": True}, "on_error": "skip"}, entry]
    fields = sft_fields(tmp_path, "graded-by-words", mlflow_uri, engine_url) | {"num_steps": 1, "eval_every": 1}
    result = sft(SftConfig.model_validate(fields | {"evaluators": evaluators}))
    assert result.metrics["points"] == 7.0
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert tags["tinker_flows.evaluation.grade"] == "B+"
    assert "no grade today" in tags["tinker_flows.warning.skipped.evaluators.0"]

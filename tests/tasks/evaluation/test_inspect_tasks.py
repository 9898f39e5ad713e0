"""Inspect AI tasks as evaluators, on the engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from engine_process import API_KEY

from blocks.errors import ConfigError
from tasks.common.tokenizers import TokenizedEvaluator
from tasks.evaluation.evaluators import build_evaluator

# `make slow` installs Inspect AI.
pytestmark = pytest.mark.slow

PATH = "tasks.evaluation.inspect_tasks:InspectTask"


def capitals(letter: str) -> Any:
    """Task of two questions; an answer is correct if it contains the letter."""
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.scorer import includes

    samples = [Sample(input=f"What is the capital of {country}?", target=letter) for country in ("France", "Italy")]
    return Task(dataset=MemoryDataset(samples, name="capitals"), scorer=includes())


def test_task_is_scored_on_the_engine(engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    params = {"task": f"{__name__}:capitals", "renderer_name": "qwen3_instruct", "sampling": {"max_tokens": 4}}
    with tinker.ServiceClient(base_url=engine_url, api_key=API_KEY) as session:
        trainer = session.create_lora_training_client("tiny", rank=1).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        for letter, share in (("", 1.0), ("no such answer", 0.0)):
            evaluator = build_evaluator(PATH, {**params, "params": {"letter": letter}})
            assert isinstance(evaluator, TokenizedEvaluator)
            metrics = asyncio.run(evaluator.measure(sampler, trainer.get_tokenizer()))
            assert metrics["test/capitals/accuracy"] == share
    assert len(list((tmp_path / "inspect-logs").iterdir())) == 2


def test_invalid_task_is_rejected_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_evaluator(PATH, {"task": "nowhere:task", "renderer_name": "x"})
    with pytest.raises(ConfigError, match="is not an import path"):
        build_evaluator(PATH, {"task": "inspect_evals/gsm8k", "renderer_name": "x", "params": {"a": 1}})
    monkeypatch.setitem(sys.modules, "tinker_cookbook.eval.inspect_evaluators", None)
    with pytest.raises(ConfigError, match=r"install it with pip install 'tinker-flows\[inspect\]'"):
        build_evaluator(PATH, {"task": f"{__name__}:capitals", "renderer_name": "x"})

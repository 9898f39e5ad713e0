"""Benchmarks of tinker-cookbook by name: grades by construction, metrics against tinker-cookbook's own run."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import tinker
from tinker import types
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, gsm8k, run_benchmark
from tinker_cookbook.renderers import get_renderer

from blocks.errors import ConfigError, EvaluatorError
from engine.tiny import byte_tokenizer
from tasks.evaluation.benchmarks import Benchmark
from tasks.evaluation.evaluators import build_evaluator

# Answer of the policy to each question: right, wrong, without an end, right after thinking, right in words of its own.
ANSWERS = ["\\boxed{3}", "It is 5.", "1 2 3 4", "**7**", "the answer is 11"]
RIGHT = [1.0, 0.0, 0.0, 1.0, 1.0]
EXPECTED = [3, 4, 4, 7, 11]
README = """---
configs:
- config_name: main
  data_files:
  - {split: test, path: main/test.jsonl}
---
"""


@dataclass
class ScriptedSampler:
    """Sampling client that answers question 0 with answer 0, and so on; may fail from a call on."""

    error: Exception | None = None
    fails_from: int = 10**6
    params: list[types.SamplingParams] = field(default_factory=list)

    async def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: types.SamplingParams, **_: Any
    ) -> types.SampleResponse:
        self.params.append(sampling_params)
        if self.error and len(self.params) > self.fails_from:
            raise self.error
        text = byte_tokenizer().decode(prompt.to_ints())
        number = int(re.findall(r"Question (\d)", text)[0])
        is_cut = number == 2
        tokens = byte_tokenizer().encode(ANSWERS[number] + ("" if is_cut else "<|im_end|>"))
        logprobs = [-0.1] * len(tokens)
        sequence = types.SampledSequence(
            "length" if is_cut else "stop", "0", _tokens_list=tokens, _logprobs_list=logprobs
        )
        return types.SampleResponse(sequences=[sequence])

    sample_async = sample


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Copy of a dataset repository of the hub, with a config named main."""
    rows = [{"question": f"Question {i}?", "answer": f"Because.\n#### {EXPECTED[i]}"} for i in range(5)]
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def measure(evaluator: Benchmark, sampler: ScriptedSampler) -> Any:
    client: Any = sampler
    return asyncio.run(evaluator.measure(client, byte_tokenizer()))


def test_metrics_equal_those_of_tinker_cookbook(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"name": "gsm8k", "renderer_name": "qwen3_instruct", "path": str(repository), "max_tokens": 64}
    evaluator = build_evaluator("tinker_flows:Benchmark", fields)
    assert isinstance(evaluator, Benchmark)
    sampler = ScriptedSampler()
    metrics = measure(evaluator, sampler)
    assert metrics["test/gsm8k"] == 3 / 5
    assert metrics["test/gsm8k_truncated"] == 1 / 5
    assert metrics["test/gsm8k_failed"] == 0
    assert metrics.scores == {"test/gsm8k": RIGHT}
    assert {(params.temperature, params.max_tokens) for params in sampler.params} == {(0.6, 64)}

    # The loader is the hub's again; tinker-cookbook gets the same rows from a stand-in.
    rows = datasets.Dataset.from_json(str(repository / "main" / "test.jsonl"))
    monkeypatch.setattr(gsm8k, "load_benchmark_dataset", lambda *_, **__: rows)
    client: Any = ScriptedSampler()
    renderer = get_renderer("qwen3_instruct", byte_tokenizer())
    result = asyncio.run(run_benchmark("gsm8k", client, renderer, BenchmarkConfig(max_tokens=64)))
    assert metrics["test/gsm8k"] == result.score
    for key, value in result.metrics.items():
        assert metrics[f"test/gsm8k_{key}"] == value


def test_several_answers_per_problem(repository: Path) -> None:
    fields = {"name": "gsm8k", "renderer_name": "qwen3_instruct", "path": str(repository), "limit": 4}
    metrics = measure(Benchmark(**fields, num_samples=3, pass_at=(1, 2)), ScriptedSampler())
    assert metrics["test/gsm8k_pass_at_2"] == metrics["test/gsm8k"] == 2 / 4
    assert metrics.scores["test/gsm8k_pass_at_1"] == RIGHT[:4]


def test_other_threads_find_the_loader_of_the_hub(repository: Path) -> None:
    loader = gsm8k.load_benchmark_dataset
    measure(Benchmark(name="gsm8k", renderer_name="qwen3_instruct", path=str(repository)), ScriptedSampler())
    assert gsm8k.load_benchmark_dataset is loader


def test_failures_are_not_wrong_answers(repository: Path) -> None:
    fields: dict[str, Any] = {"name": "gsm8k", "renderer_name": "qwen3_instruct", "path": str(repository)}
    with pytest.raises(EvaluatorError, match="2 answers to gsm8k failed, but max_failures is 1"):
        measure(Benchmark(**fields, max_failures=1), ScriptedSampler(ValueError("no"), fails_from=3))
    metrics = measure(Benchmark(**fields, max_failures=2), ScriptedSampler(ValueError("no"), fails_from=3))
    assert metrics["test/gsm8k_failed"] == 2
    lost = ScriptedSampler(tinker.APIConnectionError(request=None), fails_from=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tinker.APIConnectionError):
        measure(Benchmark(**fields, max_failures=100), lost)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "gsm9k"}, "tinker-cookbook has no benchmark 'gsm9k': use one of"),
        ({"name": "mbpp"}, "The benchmark mbpp needs a sandbox of tinker-cookbook"),
        ({"name": "arena_hard"}, "The benchmark arena_hard needs a judge"),
        ({"path": "/nowhere"}, "The directory /nowhere of the benchmark gsm8k does not exist"),
        ({"pass_at": [2]}, "pass_at has 2, but num_samples is 1"),
    ],
)
def test_wrong_benchmarks_are_refused_before_a_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_evaluator("tinker_flows:Benchmark", {"name": "gsm8k", "renderer_name": "qwen3_instruct", **changes})


def test_incomplete_data_is_refused(repository: Path) -> None:
    (repository / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"could not be loaded from the directory .*BuilderConfig 'main' not found"):
        measure(Benchmark(name="gsm8k", renderer_name="qwen3_instruct", path=str(repository)), ScriptedSampler())

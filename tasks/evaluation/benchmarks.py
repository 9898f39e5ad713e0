"""Benchmarks of tinker-cookbook as evaluators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import tinker
from pydantic import Field
from pydantic.dataclasses import dataclass
from tinker_cookbook.eval.benchmarks import BenchmarkBuilder, BenchmarkConfig, BenchmarkResult, run_benchmark
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Env
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError, EvaluatorError, reason
from tasks.common.internals.cookbook import find_benchmark, local_datasets, was_truncated
from tasks.common.sampling import open_renderer
from tasks.evaluation.grading_metrics import Graded, check_pass_at, digest_problems, summarize
from tasks.evaluation.sampled import GradedEvaluator
from tasks.training.held_out import GradedMetrics


@dataclass(frozen=True, kw_only=True)
class Benchmark(GradedEvaluator):
    """Benchmark of tinker-cookbook, on data of the hub or of a local directory.

    The metric `test/<name>` is the share of right answers, and `test/<name>_<metric>` a metric of the benchmark's own.
    tinker-cookbook samples without a seed, so the same weights may give other answers.

    Attributes:
        name: name of the benchmark in tinker-cookbook, such as `gsm8k`, `math500`, `ifeval` or `mmlu_pro`.
        renderer_name: tinker-cookbook renderer of the model's chat format.
        path: directory with a copy of the benchmark's dataset repository; empty to load it from the hub.
        limit: maximum number of problems; None for all.
        num_samples: answers per problem.
        max_tokens: maximum tokens of an answer.
        temperature: sampling temperature.
        context_window: maximum tokens of a prompt and its answer together, which may shorten the answer; None for no
            limit.
        system_prompt: system prompt; None for the one that tinker-cookbook recommends for the benchmark.
        concurrency: problems in progress at once.
        timeout_s: seconds per problem; None for what tinker-cookbook recommends for the benchmark.
        max_failures: number of answers that may fail (time limit, error of the environment) and count as wrong.
    """

    renderer_name: str
    path: str = ""
    limit: int | None = Field(default=None, ge=1)
    num_samples: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=2048, ge=1)
    temperature: float = Field(default=0.6, ge=0)
    context_window: int | None = Field(default=None, ge=1)
    system_prompt: str | None = None
    concurrency: int = Field(default=64, ge=1)
    timeout_s: float | None = Field(default=None, gt=0)
    max_failures: int = Field(default=0, ge=0)

    def __post_init__(self) -> None:
        """Find the benchmark, so that a wrong name or directory surfaces before a run starts."""
        check_pass_at(self.pass_at, self.num_samples)
        if self.builder.requires_judge or self.builder.requires_sandbox:
            need = "a judge" if self.builder.requires_judge else "a sandbox of tinker-cookbook"
            raise ConfigError(
                f"The benchmark {self.name} needs {need}, which no evaluator of a config has: choose another "
                "one, or run it with tinker-cookbook's run_benchmark."
            )
        if self.path and not Path(self.path).is_dir():
            raise ConfigError(
                f"The directory {self.path} of the benchmark {self.name} does not exist: give a copy of the dataset's "
                "repository, or leave path empty to load it from the hub."
            )

    @cached_property
    def builder(self) -> BenchmarkBuilder:
        """Benchmark of tinker-cookbook.

        Raises:
            ConfigError: tinker-cookbook has no benchmark of this name.
        """
        if (builder := find_benchmark(self.name)) is None:
            raise ConfigError(
                f"tinker-cookbook has no benchmark {self.name!r}: use one of tinker_cookbook.eval.benchmarks, such as "
                "gsm8k, math500, ifeval or mmlu_pro."
            )
        return builder

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> GradedMetrics:
        """Return the metrics of the sampler's weights.

        Raises:
            ConfigError: the data cannot be loaded, or the renderer does not suit the tokenizer.
            EvaluatorError: more than `max_failures` answers failed.
            tinker.TinkerError: the service failed.
        """
        renderer = open_renderer(self.renderer_name, tokenizer)
        recorded = _RecordedBenchmark(self.builder, self.path)
        results = [await self._run(recorded, sampler, renderer) for _ in range(self.num_samples)]
        num_failed = sum(result.num_errors for result in results)
        if num_failed > self.max_failures:
            raise EvaluatorError(
                f"{num_failed} answers to {self.name} failed, but max_failures is {self.max_failures}: see the log, "
                "raise timeout_s, or raise max_failures to count them as wrong."
            )
        graded_PG = list(zip(*recorded.graded_GP, strict=True))
        summary = summarize(self.name, graded_PG, self.pass_at, recorded.problems)
        benchmark_metrics = {
            f"test/{self.name}_{key.removeprefix(f'{self.name}/')}": fmean(result.metrics[key] for result in results)
            for key in results[0].metrics
        }
        failed = {f"test/{self.name}_failed": num_failed}
        return GradedMetrics(benchmark_metrics | failed | summary, summary.scores, summary.problems)

    async def _run(
        self, benchmark: BenchmarkBuilder, sampler: tinker.SamplingClient, renderer: Renderer
    ) -> BenchmarkResult:
        """Answer each problem once."""
        monitored = _MonitoredSampler(sampler)
        config = BenchmarkConfig(
            max_examples=self.limit,
            concurrency=self.concurrency,
            agent_concurrency=self.concurrency,
            timeout_seconds=self.timeout_s or self.builder.recommended_timeout,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
            system_prompt=self.system_prompt,
        )
        result = await run_benchmark(benchmark, cast(tinker.SamplingClient, monitored), renderer, config)
        if monitored.error:
            raise monitored.error
        return result


class _MonitoredSampler:
    """Sampling client that keeps its last error, because tinker-cookbook only counts the error as a wrong answer."""

    def __init__(self, sampler: tinker.SamplingClient) -> None:
        self.error: tinker.TinkerError | None = None
        self._sampler = sampler

    async def sample(self, *args: Any, **kwargs: Any) -> tinker.SampleResponse:
        try:
            return await self._sampler.sample(*args, **kwargs)
        except tinker.TinkerError as error:
            self.error = error
            raise

    sample_async = sample  # of tinker-cookbook before 0.6


class _RecordedBenchmark(BenchmarkBuilder):
    """Benchmark that keeps the grade of each problem; tinker-cookbook returns only the mean of the grades.

    Attributes:
        graded_GP: grades of the problems in each round.
        problems: digest of the problems.
    """

    def __init__(self, builder: BenchmarkBuilder, path: str) -> None:
        self.name, self.multi_turn = builder.name, builder.multi_turn
        self.recommended_system_prompt = builder.recommended_system_prompt
        self.experimental = builder.experimental
        self.graded_GP: list[list[Graded]] = []
        self.problems = ""
        self._builder, self._path = builder, path

    def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> Sequence[Env]:
        place = f"the directory {self._path}" if self._path else "the hub"
        try:
            with local_datasets(self._builder, Path(self._path)) if self._path else nullcontext():
                envs = self._builder.make_envs(renderer, config)
        except Exception as error:  # datasets raises errors of many kinds
            raise ConfigError(
                f"The data of the benchmark {self.name} could not be loaded from {place} ({reason(error)}): set path "
                "to a complete copy of the dataset's repository."
            ) from error
        if not envs:
            raise ConfigError(f"The benchmark {self.name} found no problems in {place}: check path and limit.")
        self.problems = digest_problems(str(getattr(env, "example_id", number)) for number, env in enumerate(envs))
        return envs

    def aggregate(self, rewards: list[float], metrics_list: list[dict[str, float | int]]) -> BenchmarkResult:
        pairs = zip(rewards, metrics_list, strict=True)
        self.graded_GP.append([Graded(reward > 0, was_truncated(metrics)) for reward, metrics in pairs])
        return self._builder.aggregate(rewards, metrics_list)

"""Inspect AI tasks as evaluators, through tinker-cookbook; needs the extra `inspect`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import Any

import tinker
from pydantic.dataclasses import dataclass
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError, reason
from blocks.files.local import home
from objectives.config.import_policy import check_module
from tasks.common.builders import import_builder
from tasks.common.sampling import Sampling, open_renderer
from tasks.common.tokenizers import TokenizedEvaluator

_REGISTERED = re.compile(r"\w+/\w+")


@dataclass(frozen=True, kw_only=True)
class InspectTask(TokenizedEvaluator):
    """Scores of an Inspect task, as `test/<dataset>/<score>`; Inspect's logs go to `inspect-logs` in the home folder.

    Attributes:
        task: import path of a function that creates the task, or a name registered with Inspect, such as
            `inspect_evals/gsm8k`.
        renderer_name: tinker-cookbook renderer of the model's chat format.
        params: keyword arguments of the function.
        limit: maximum number of samples.
        sampling: sampling parameters; `num_samples` becomes Inspect's number of choices.
    """

    task: str
    renderer_name: str
    params: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Import Inspect and a task that is an import path, so that errors surface before a run starts."""
        assert self._builder  # imports Inspect
        if self.params and ":" not in self.task:
            raise ConfigError(
                f"The task {self.task!r} has params but is not an import path: give package.module:function."
            )
        if ":" in self.task:
            import_builder(self.task, "task", ())
        else:  # a name that a package has registered, or a file with code
            check_module(self.task.partition("/")[0] if _REGISTERED.fullmatch(self.task) else self.task, self.task)

    @cached_property
    def _builder(self) -> Callable[..., Any]:
        try:
            from tinker_cookbook.eval.inspect_evaluators import InspectEvaluatorBuilder
        except ImportError as error:
            raise ConfigError(
                f"Inspect tasks need Inspect AI ({reason(error)}): install it with pip install 'tinker-flows[inspect]'."
            ) from error
        return InspectEvaluatorBuilder

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        open_renderer(self.renderer_name, tokenizer)
        logs = home() / "inspect-logs"
        evaluator = self._builder(
            tasks=[import_builder(self.task, "task", ())(**self.params)] if ":" in self.task else [self.task],
            renderer_name=self.renderer_name,
            model_name=tokenizer.name_or_path,
            limit=self.limit,
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            num_choices=self.sampling.num_samples,
            seed=self.sampling.seed,
            log_dir=str(logs),
            log_level="warning",
        )()
        metrics = await evaluator(sampler)
        if not metrics:
            raise ConfigError(f"The Inspect task {self.task} returned no score: check its log in {logs}.")
        return {f"test/{key}": float(value) for key, value in metrics.items()}

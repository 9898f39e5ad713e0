"""Names, values and errors of user-defined evaluators."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from pathlib import Path

import pytest
import tinker
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_metric
from mlflow_store import new_store
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator

from blocks.errors import ConfigError, EvaluatorError, ServiceError, ServiceLostError
from flows.config.base import EvaluatorConfig
from flows.monitoring import run_tags
from flows.monitoring.run_tags import note_evaluation
from tasks.evaluation import evaluators
from tasks.evaluation.evaluators import EvaluationResult, build_evaluators
from tasks.evaluation.sampled import CodeTests
from tasks.training.tracking.metric_names import safe_name
from tasks.training.tracking.metrics import MetricsLog


def test_safe_names_are_accepted_by_mlflow_and_distinct() -> None:
    """Names of up to five characters of an alphabet that can spell `-x4-`, and names that need an escape or a cut."""
    names = ["".join(letters) for size in range(6) for letters in itertools.product("-x4@/.", repeat=size)]
    names += ["acc (%)", "größe", "a" * 300, "a" * 301, "@" * 100, "@" * 101, "a\nb", "a-x40@", "a@x40-"]
    safe = [safe_name(name) for name in names]
    assert len(set(safe)) == len(names)
    for name in safe:
        _validate_metric(f"baseline/{name}", 1.0, 0, 0)
    for name in ("test/nll", "test/a b:c", "a-x", "größe", "x.y-4"):
        assert safe_name(name) == name


class Evaluator(SamplingClientEvaluator):
    """Evaluator that returns given metrics, or raises an error of the given name."""

    def __init__(self, metrics: dict[str, object] | None = None, error: str = "") -> None:
        self.metrics, self.error = metrics or {}, error

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        if self.error == "lost":
            raise tinker.APIConnectionError(request=None)  # pyright: ignore[reportArgumentType]
        if self.error == "rejected":
            raise tinker.TinkerError("no such adapter")
        if self.error == "value":
            raise ValueError("no final number in the answer")
        if self.error == "key":
            raise KeyError("answer")
        if self.error == "exit":
            sys.exit(3)
        return self.metrics  # pyright: ignore[reportReturnType]


class NeedsTraining(TrainingClientEvaluator):
    pass


class WithoutBase:
    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        return {"test/mine": 1.0}


def run(*entries: dict[str, object], builder: str = "Evaluator") -> EvaluationResult:
    configs = [
        EvaluatorConfig.model_validate(
            {"builder": f"{__name__}:{builder}", "on_error": entry.pop("on_error", "raise"), "params": entry}
        )
        for entry in entries
    ]
    # The evaluators do not use the client.
    return asyncio.run(evaluators.evaluate_sampler.fn(None, build_evaluators(configs)))  # pyright: ignore


@pytest.fixture(autouse=True)
def plain_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log outside a flow, where Prefect has no run logger."""
    monkeypatch.setattr(run_tags, "get_run_logger", lambda: logging.getLogger("run"))


@pytest.fixture(scope="module")
def mlflow_log(tmp_path_factory: pytest.TempPathFactory) -> MetricsLog:
    client = MlflowClient(new_store(tmp_path_factory.mktemp("mlflow")))
    return MetricsLog(client, client.create_run("0").info.run_id)


def test_metrics_reach_mlflow(mlflow_log: MetricsLog) -> None:
    result = run({"metrics": {"pass@1": 0.5, "acc (%)": 40, "verdict": "mostly @ right", "test/plain": True}})
    mlflow_log.log(0, result.metrics)
    note_evaluation(mlflow_log, result)
    mlflow_log.flush()
    data = mlflow_log.client.get_run(mlflow_log.run_id).data
    expected = {"pass-x40-1": 0.5, "acc -x28--x25--x29-": 40.0, "test/plain": 1.0, "progress/batch": 0.0}
    assert data.metrics == expected
    assert data.tags["tinker_flows.evaluation.verdict"] == "mostly @ right"


def test_an_evaluator_without_a_base_class_is_told_to_inherit() -> None:
    with pytest.raises(ConfigError, match=r"WithoutBase: return an object whose class inherits from tinker-cookbook's"):
        run({}, builder="WithoutBase")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"error": "value"}, r"The evaluator .*:Evaluator \(evaluators\.0\) failed \(ValueError: no final number"),
        ({"error": "exit"}, r"failed \(SystemExit: 3\): fix it"),
        ({"error": "key"}, r"failed \(KeyError: 'answer'\): fix it, or set its on_error to 'skip'"),
        ({"metrics": {"a": [1]}}, r"Evaluator \(evaluators\.0\) returned a list as the metric 'a': return a number or"),
        (
            {"metrics": {"test/a": 1.0, "optim/lr": 3.0}},
            r"returned the metric 'optim/lr', which the run itself logs: rename",
        ),
        ({"metrics": {"num_tokens": 3.0}}, "returned the metric 'num_tokens', which the run itself logs: rename it"),
        ({"metrics": {"a": None}}, "returned a NoneType as the metric 'a'"),
    ],
)
def test_an_error_names_the_evaluator(
    entry: dict[str, object], message: str, caplog: pytest.LogCaptureFixture, mlflow_log: MetricsLog
) -> None:
    with pytest.raises(EvaluatorError, match=message):
        run(dict(entry))
    result = run({**entry, "on_error": "skip"}, {"metrics": {"b": 2}})
    assert result.metrics == {"b": 2.0}
    assert list(result.skipped) == ["evaluators.0"]
    with caplog.at_level(logging.WARNING, "run"):
        note_evaluation(mlflow_log, result, step=3)
    warning = f"An evaluation was skipped at step 3. {result.skipped['evaluators.0']}"
    assert warning in caplog.text
    mlflow_log.flush()
    tags = mlflow_log.client.get_run(mlflow_log.run_id).data.tags
    assert tags["tinker_flows.warning.skipped.evaluators.0"] == warning


def test_metrics_of_the_same_name_are_refused() -> None:
    with pytest.raises(EvaluatorError, match=r"\(evaluators\.1\) returned the metric 'a', as the held-out data or an"):
        run({"metrics": {"a": 1.0}}, {"metrics": {"b": 1.0, "a": 2.0}})
    result = run(
        {"metrics": {"a": 1.0}}, {"metrics": {"a": "text", "b": 1.0}, "on_error": "skip"}, {"metrics": {"c": 3}}
    )
    assert (result.metrics, result.texts, list(result.skipped)) == ({"a": 1.0, "c": 3.0}, {}, ["evaluators.1"])


def test_errors_of_the_service_are_not_the_evaluators() -> None:
    with pytest.raises(ServiceError, match=r"service could not run the evaluator .*Evaluator.*: no such adapter"):
        run({"error": "rejected"})
    with pytest.raises(ServiceLostError):  # restarts the run
        run({"error": "lost", "on_error": "skip"})
    with pytest.raises(ConfigError, match="needs a training client"):
        run({"on_error": "skip"}, builder="NeedsTraining")


@pytest.mark.parametrize("prompt", ["def one():", "def one():\n"])
def test_the_code_block_of_a_question_ends_on_a_line_of_its_own(prompt: str, tmp_path: Path) -> None:
    row = {"prompt": prompt, "test": "", "entry_point": "one"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    evaluator = CodeTests(path=str(tmp_path / "rows.jsonl"), renderer_name="qwen3_instruct", instruction="Complete.")
    assert evaluator.question(row) == "Complete.\n\n```python\ndef one():\n```"

"""Examples of the report: their scores against the evaluators' metrics, and a training that they leave as it is."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from dpo_config import dpo_fields
from metric_history import history
from rl_config import rl_fields
from sft_config import sft_fields

from blocks import RunStorage
from examples.gsm8k import DATA
from flows.config.dpo import DpoConfig
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.dpo import dpo
from flows.estimates.supervised import estimate
from flows.rl import rl
from flows.sft import sft
from tasks.training.examples import Example, read_examples

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def examples_of(folder: Path, name: str) -> dict[int, list[Example]]:
    return read_examples(RunStorage(url=str(folder / "runs")).run_directory(name))


def is_false(annotation: str) -> bool:
    """Return whether a calculator annotation such as <<2*3=7>> is false, by Python's own arithmetic."""
    left, _, right = annotation.strip("<>").partition("=")
    return not math.isclose(eval(left), eval(right))


def trained(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the metrics of each step that depend on the weights."""
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss/", "train_mean_nll", "test/nll", "term/")
    return [{k: v for k, v in line.items() if k.startswith(keys) and not k.endswith("duration_s")} for line in lines]


def test_supervised_examples_are_sampled_at_both_ends_and_change_no_bit(
    tmp_path: Path, engine_url: str, mlflow_uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The held-out data has fewer prompts than the report may have examples."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((DATA / "gsm8k_test.jsonl").read_text().splitlines(keepends=True)[:2]))
    results = {}
    for name, num in (("with", 3), ("without", 0)):
        fields = sft_fields(tmp_path, name, mlflow_uri, engine_url) | {"num_steps": 4, "eval_every": 2}
        fields["data"]["params"]["test_path"] = str(held_out)
        config = SftConfig.model_validate(fields | {"report": {"num_examples": num, "max_tokens": 12}})
        results[name] = sft(config), estimate(config)
    assert "sampling 2 examples for the report" in capfd.readouterr().err
    assert trained(tmp_path, "with") == trained(tmp_path, "without")
    assert examples_of(tmp_path, "without") == {}
    examples = examples_of(tmp_path, "with")
    assert sorted(examples) == [0, 4]
    for shown in examples.values():
        assert len({example.prompt for example in shown}) == 2
        # The corrupted copy of a solution has annotations that are false, which the solution has not.
        assert all(example.other_title == "in the data, the most marked of 2" for example in shown)
        assert all(example.other_flags for example in shown)
        for flag in (flag for example in shown for flag in example.other_flags if flag.term == "logic"):
            assert is_false(next(e.other for e in shown if flag in e.other_flags)[flag.start : flag.end])
        assert all({"topology", "logic", "confidence"} <= example.scores.keys() for example in shown)
        # Twelve bytes of an untrained model have no annotation.
        assert all(example.unchecked == ("topology", "logic") for example in shown)
    result, estimated = results["with"]
    assert estimated.examples.num_sample_tokens == 2 * 2 * 12
    assert 0 < result.metrics["cost/num_sample_tokens"] <= 2 * 2 * 12
    assert result.metrics["cost/num_prefill_tokens"] == estimated.examples.num_prefill_tokens
    report = Path(result.report).read_text()
    assert "Examples before and after" in report
    assert '<mark title="logic: ' in report
    assert "<td>nothing to check<td>" in report


def test_margins_of_pairs_average_to_the_metric(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = dpo_fields(tmp_path, "pairs", mlflow_uri, engine_url) | {"report": {"num_examples": 1000}}
    result = dpo(DpoConfig.model_validate(fields))
    for step, examples in examples_of(tmp_path, "pairs").items():
        margins = [example.scores["margin"] for example in examples]
        assert statistics.mean(margins) == pytest.approx(history(result, "test/margin")[step], abs=1e-4)
        assert {example.other_title for example in examples} == {"rejected"}


def test_rewards_of_rollouts_are_those_of_the_environment(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = rl_fields(tmp_path, "rollouts", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 2}
    rl(RlConfig.model_validate(fields))
    examples = examples_of(tmp_path, "rollouts")
    assert sorted(examples) == [0, 2]
    for example in (example for shown in examples.values() for example in shown):
        assert "8 times." in example.prompt
        # The reward as examples.letters defines it, from the text alone.
        num_letters = example.scores["num_letters"]
        assert example.scores["reward"] == pytest.approx(num_letters / max(8, len(example.completion)), abs=0.05)

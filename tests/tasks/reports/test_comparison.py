"""Comparison of two runs, against scipy's paired t-test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mlflow.entities import Param, Run, RunData, RunInfo, RunStatus, RunTag
from scipy.stats import ttest_rel

from blocks.storage import RunStorage
from tasks.reports.comparison import ReportedRun, compare_held_out, comparison_page
from tasks.training.examples import Example, append_examples
from tasks.training.held_out import BatchValues, append_batch_values

VALUES = {"first": [0.1, 0.053, 0.07], "second": [0.09, 0.0582, 0.05]}


def stored(folder: Path, name: str, rate: str) -> ReportedRun:
    values = VALUES[name]
    history = {
        "test/nll": [(0, 2.0), (6, 1.0 if name == "first" else 0.5)],
        "test/term/logic/value": [(6, sum(values) / 3)],
        f"test/only_{name}": [(6, 1.0)],
        **{f"term/{term}/weight": [(0, 1.0)] for term in ("base", "logic")},
    }
    params = [Param("learning_rate", rate), Param("model", "tiny"), Param("run_name", name)]
    tags = [RunTag("prefect.flow_name", "sft"), RunTag("tinker_flows.warning.x", f"Warning of {name}.")]
    info = RunInfo("id", "1", "user", RunStatus.to_string(RunStatus.FINISHED), 0, 1, "active")
    with RunStorage(url=str(folder)).run_directory(name) as directory:
        append_batch_values(directory, 6, {"logic": BatchValues(values, [2] * 3)}, {})
        append_examples(directory, 6, [Example("prompt", f"completion of {name}")])
        digests = {"terms": {"logic": f"code of {name}", "topology": "same"}, "data": {f"{name}.jsonl": "1"}}
        record = {"name": "6", "batch": 6, "epoch": 0, "final": True, "state_path": "tinker://a/weights/final"}
        record |= {"contents": {"digests": digests}}
        directory.append_line("checkpoints.jsonl", json.dumps(record))
        return ReportedRun(name, Run(info, RunData(params=params, tags=tags)), directory, history)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[ReportedRun, ReportedRun]:
    return stored(tmp_path, "first", "0.001"), stored(tmp_path, "second", "0.002")


def test_differences_of_terms_are_paired(runs: tuple[ReportedRun, ReportedRun]) -> None:
    nll, logic = compare_held_out(*(run.summary().held_out for run in runs))
    assert nll.format() == ("nll", "1 (step 6)", "0.5 (step 6)", "-0.5")
    interval = ttest_rel(VALUES["second"], VALUES["first"]).confidence_interval(0.95)
    assert logic.change.value == pytest.approx((interval.high + interval.low) / 2)
    assert logic.change.half_width == pytest.approx((interval.high - interval.low) / 2)


def test_means_over_tokens_of_different_tokenizers_have_no_difference(runs: tuple[ReportedRun, ReportedRun]) -> None:
    for number, run in enumerate(runs):
        record = json.loads(run.directory.read_bytes("checkpoints.jsonl") or b"")
        record["contents"]["digests"]["tokenizer"] = {"tokenizer": str(number)}
        run.directory.write_bytes("checkpoints.jsonl", json.dumps(record).encode() + b"\n")
    page = comparison_page(*runs)
    assert "<td>nll<td>1 (step 6)<td>0.5 (step 6)<td>not comparable (different tokenizers)" in page
    assert re.search(r"logic on held-out data: .* nll cannot be compared: the tokenizers of the runs differ\.", page)


def test_the_page_has_both_runs_and_only_the_settings_that_differ(runs: tuple[ReportedRun, ReportedRun]) -> None:
    page = comparison_page(*runs)
    assert "nll on held-out data: 1 (step 6) in first, 0.5 (step 6) in second, difference -0.5." in page
    assert "<tr><td>learning_rate<td>0.001<td>0.002" in page
    assert "<tr><td>run_name" not in page
    assert "terms: the content of logic differs between the runs." in page
    assert "first: terms" in page
    assert "Warnings of first" in page
    assert "completion of first" in page
    assert "completion of second" in page
    assert page.count('class="plot"') >= 2

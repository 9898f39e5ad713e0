"""Summary of a run: verdict, facts, warnings, and the held-out data before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.entities import Param, Run, RunData, RunInfo, RunStatus, RunTag

from blocks.storage import RunDirectory, RunStorage
from tasks.reports.summary import RunSummary, summarize
from tasks.reports.tables import Control, Estimate, held_out_rows, held_out_table
from tasks.training.held_out import BatchValues

HISTORY = {
    "test/nll": [(0, 1.5482), (12, 1.103), (24, 1.0611)],
    "test/term/logic/value": [(0, 0.0765), (24, 0.0741)],
    "test/term/logic/stderr": [(0, 0.0253), (24, 0.0244)],
    "cost/hours": [(23, 0.5)],
    "cost/num_train_tokens": [(23, 1234.0)],
}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunStorage(url=str(tmp_path)).run_directory("mine")


def record(directory: RunDirectory, step: int, *, final: bool) -> None:
    line = {"name": f"{step:06}", "batch": step, "epoch": 0, "final": final, "state_path": f"tinker://a/weights/{step}"}
    directory.append_line("checkpoints.jsonl", json.dumps(line))


def summary(directory: RunDirectory, **tags: str) -> RunSummary:
    params = {"model": "tiny", "learning_rate": "0.001", "lr_schedule": "linear", "data.builder": "a:B"}
    data = RunData(
        params=[Param(key, value) for key, value in params.items()],
        tags=[RunTag(key.replace("__", "."), value) for key, value in (tags | {"prefect__flow_name": "sft"}).items()],
    )
    info = RunInfo("id", "1", "user", RunStatus.to_string(RunStatus.FINISHED), 0, 1, "active")
    return summarize("mine", Run(info, data), directory, HISTORY)


def test_finished_run(directory: RunDirectory, tmp_path: Path) -> None:
    with directory:
        record(directory, 12, final=False)
        record(directory, 24, final=True)
    result = summary(directory)
    assert result.verdict == "No warning; nll on held-out data went from 1.548 to 1.061."
    facts = dict(result.facts)
    assert facts["cost"] == "30.0 min, 1,234 tokens trained, price unknown"
    assert facts["learning rate"] == "0.001, linear"
    assert (facts["method"], facts["data"], facts["steps"]) == ("sft", "a:B", "24")
    assert result.weights == "tinker://a/weights/24"
    assert result.commands[0] == f'tinker-flows sample mine@final "PROMPT" --storage {tmp_path}'


def test_stopped_run_with_warnings(directory: RunDirectory) -> None:
    with directory:
        record(directory, 12, final=False)
    tags = {"tinker_flows__warning.conflict.base.logic": "They conflict.", "tinker_flows__skipped.x": "Step 3: no."}
    result = summary(directory, tinker_flows__stopped="The budget is spent.", **tags)
    assert result.verdict.startswith("The budget is spent. 2 warnings; nll on held-out data")
    assert result.warnings == ("They conflict.", "An evaluation was skipped. Step 3: no.")
    assert [command.split()[1] for command in result.commands] == ["resume"]


def test_held_out_table_has_a_column_for_the_control() -> None:
    batches = {
        0: {"logic": BatchValues([0.1, 0.053], [2, 2])},
        24: {"logic": BatchValues([0.09, 0.0582], [2, 2])},
    }
    rows = held_out_rows(HISTORY, batches)
    assert [row.metric for row in rows] == ["nll", "logic"]
    control = Control(Estimate(0.0755, 0.025), BatchValues([0.1, 0.051], [2, 2]))
    columns, cells = held_out_table(rows, {"logic": control})
    assert columns == [
        "held-out data",
        "before (step 0)",
        "after (step 24)",
        "without the terms",
        "effect of the terms",
    ]
    # Differences of the batches -0.01 and +0.0072: mean -0.0014, standard error 0.0086.
    assert cells == [
        ["nll", "1.548", "1.061", "", ""],
        ["logic", "0.0765 ± 0.05", "0.0741 ± 0.048", "0.0755 ± 0.049", "-0.0014 ± 0.017"],
    ]
    # Differences -0.01 and +0.0052: mean -0.0024, standard error 0.0076.
    columns, cells = held_out_table(rows)
    assert columns[-1] == "change"
    assert [line[-1] for line in cells] == ["-0.4871", "-0.0024 ± 0.015"]
    other_data = {"logic": Control(Estimate(0.0755), BatchValues([0.1], [4]))}
    assert held_out_table(rows, other_data)[1][1][-1] == "-0.0014"


def test_the_main_metric_comes_first() -> None:
    rows = held_out_rows(HISTORY | {"test/bits_per_byte": [(0, 1.0)]}, {})
    assert [row.metric for row in rows] == ["nll", "bits_per_byte", "logic"]

"""Labelled rows: their labels reach the terms of a run, and rows with errors are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from sft_config import sft_fields

from blocks.errors import ConfigError
from flows.config.train import SftConfig
from flows.sft import sft
from tasks.common.jsonl import parse_rows
from tasks.supervised.labelled_data import parse_labelled_row

RULES = "(declare-const x Int)(declare-const y Int)(assert (= (+ x y) {total}))(assert (> x y))"


def write_rows(path: Path) -> str:
    rows = [
        {
            "prompt": f"Split {total} into x > y.",
            "completions": [f"x = {total - 1}, y = 1", f"x = 1, y = {total - 1}", "none"],
            "labels": {"constraints": RULES.format(total=total), "group": total % 2},
        }
        for total in range(3, 11)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.process
def test_constraints_of_a_file_train_a_run(
    tmp_path: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    tracking = f"sqlite:///{tmp_path / 'mlflow.db'}"
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": 2}
    logic = {
        "name": "logic",
        "weight": 3.0,
        "params": {"extractor": "assignments", "constraints": "constraints", "unchecked": 0.8},
    }
    fields = sft_fields(tmp_path, "constraints", tracking, engine_url) | {
        "num_steps": 2,
        "eval_every": 0,
        "data": {
            "builder": "tinker_flows:LabelledBuilder",
            "params": {"path": write_rows(tmp_path / "rows.jsonl"), "common_config": common},
        },
        "objective": {"regularizers": [logic, {"name": "equalized_loss", "on_error": "skip"}]},
    }
    result = sft(SftConfig.model_validate(fields))
    client = MlflowClient(tracking)

    def history(key: str) -> list[float]:
        return [point.value for point in client.get_metric_history(result.mlflow_run_id, key)]

    # Per prompt: the first answer holds both constraints, the second violates one, the third leaves both open.
    assert history("term/logic/checked") == [8.0, 8.0]
    assert history("term/logic/violated") == [2.0, 2.0]
    assert history("term/logic/unstated") == [4.0, 4.0]
    assert history("term/logic/unchecked") == [2.0, 2.0]
    assert all(value > 0 for value in history("term/logic/grad_share"))
    assert history("term/logic/trained_prompts") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completions": ["b"]}, r"Line 2 .* with prompt, completions and labels \(.*labels"),
        ({"prompt": 1, "completions": ["b"], "labels": {}}, r"prompt is 1; write a text"),
        ({"prompt": "a", "completions": "b", "labels": {}}, r"completions is 'b'; write a list of texts"),
        ({"prompt": "a", "completions": [], "labels": {}}, r"completions is \[\]"),
        ({"prompt": "a", "completions": ["b"], "labels": {"g": 0.5}}, r"labels is \{'g': 0.5\}; write integers or"),
    ],
)
def test_a_row_with_errors_is_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    valid = {"prompt": "a", "completions": ["b"], "labels": {}}
    path.write_text(f"{json.dumps(valid)}\n{json.dumps(row)}\n")
    with pytest.raises(ConfigError, match=message):
        parse_rows(str(path), parse_labelled_row, "prompt, completions and labels")

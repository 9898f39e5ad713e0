"""`python -m flows.NAME --help` and `--fields`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

FLOWS = ["sft", "dpo", "rl", "rlhf", "evaluate", "compare", "export", "sweep"]


@pytest.mark.process
@pytest.mark.parametrize("flow", FLOWS)
def test_help_imports_neither_the_flow_nor_its_config(flow: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", f"flows.{flow}", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"usage: python -m flows.{flow}" in shown.stdout
    modules = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "flows.runs.cli" in modules
    assert not modules & {"prefect", "torch", "tinker", "mlflow", "pydantic.main", "flows.config.base"}


@pytest.mark.process
@pytest.mark.parametrize(("flow", "field"), [("sft", "learning_rate"), ("sweep", "concurrency")])
def test_fields_are_listed(flow: str, field: str) -> None:
    command = [sys.executable, "-m", f"flows.{flow}", "--fields"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^  {field}=\S+  \w", shown, re.MULTILINE)

"""The command `tinker-flows`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from deployments.command_line import main

ROOT = Path(__file__).parents[2]


def test_the_script_leads_to_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["tinker-flows"].partition(":")
    assert getattr(import_module(module), name) is main


def test_regularizers_are_listed_with_kind_and_parameters() -> None:
    command = [sys.executable, "-m", "deployments.command_line", "regularizers"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    for text in ("confidence", "differentiable", "minimum_risk", "alpha: float > 0 = 1.0", "Share of violated"):
        assert text in shown.stdout
    assert shown.stderr == ""


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["regularisers"])
    assert "Did you mean 'regularizers'" in capsys.readouterr().err

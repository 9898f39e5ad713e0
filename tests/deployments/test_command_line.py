"""The command `tinker-flows`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from deployments.command_line import app, main
from deployments.methods import METHODS, config_type_of, flow_of
from flows.config import NamedConfig

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """The exit status, standard output and error of a command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_the_script_leads_to_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["tinker-flows"].partition(":")
    assert getattr(import_module(module), name) is main


def test_the_help_imports_nothing_that_takes_seconds() -> None:
    script = "import sys\ntry:\n    import deployments.command_line as c; c.main(['--help'])\n"
    script += "finally:\n    print(sorted({'prefect', 'mlflow', 'torch', 'tinker'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("[]\n")
    assert all(f" {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_argument_is_explained(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, shown, _ = ended(capsys, command, "--help")
    assert code == 0
    assert f"Usage: tinker-flows {command}" in " ".join(shown.split())
    for parameter in get_command(app).commands[command].params:  # pyright: ignore[reportAttributeAccessIssue]
        assert parameter.help, f"{command} {parameter.name}"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_leads_to_its_flow_and_config(method: str) -> None:
    assert flow_of(method).name == method
    assert issubclass(config_type_of(method), NamedConfig)


def test_the_fields_of_a_method_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main_ended = ended(capsys, "run", "sft", "--fields")
    assert main_ended[0] == 0
    assert "  learning_rate=0.0001  At the first step." in main_ended[1]


def test_regularizers_are_listed_with_kind_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = ended(capsys, "regularizers")
    assert code == 0
    for text in ("confidence", "differentiable", "minimum_risk", "alpha: float > 0 = 1.0", "Share of violated"):
        assert text in shown
    code, shown, _ = ended(capsys, "regularizers", "--json")
    (logic,) = (each for each in json.loads(shown) if each["name"] == "logic")
    assert logic["estimator"] == "minimum_risk"
    assert {"name": "alpha", "type": "float > 0", "default": "1.0"}.items() <= logic["parameters"][-1].items()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "sfd"], "There is no method 'sfd': give one of "),
        (["run", "sft", "--config", "absent.yaml"], "The config file absent.yaml could not be read"),
        (["run", "sft", "model"], "The argument 'model' is not of the form field=value"),
        (["resume", "absent"], "There is no run 'absent' in "),
        (["status", "absent"], "There is no run 'absent' in "),
        (["report", "absent"], "There is no run 'absent' in "),
    ],
)
def test_what_the_user_can_mend_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    code, _, _ = ended(capsys, *arguments)
    assert str(code).startswith(f"error: {sentence}")
    assert str(code).count("\n") == 0


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = ended(capsys, "regularisers")
    assert code == 2
    assert "Did you mean 'regularizers'" in said


def test_a_shell_completes_commands_and_methods() -> None:
    for words, wanted in (("tinker-flows reg", "regularizers"), ("tinker-flows run s", "sft")):
        done = subprocess.run(
            [Path(sys.executable).with_name("tinker-flows")],
            env={"_TINKER_FLOWS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert wanted in done.stdout, done.stderr

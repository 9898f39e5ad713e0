"""Command line `tinker-flows`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from deployments.command_line import app, main
from deployments.methods import METHODS, config_type_of, flow_of
from flows.config.base import NamedConfig

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Run a command; return its exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    output = capsys.readouterr()
    return exit_info.value.code, output.out, output.err


def test_console_script_points_to_main() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["tinker-flows"].partition(":")
    assert getattr(import_module(module), name) is main


@pytest.mark.process
def test_help_imports_no_slow_package() -> None:
    script = "import sys\ntry:\n    import deployments.command_line as c; c.main(['--help'])\n"
    script += "finally:\n    print(sorted({'prefect', 'mlflow', 'torch', 'tinker'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("[]\n")
    assert all(f" {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_argument_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, shown, _ = run_command(capsys, command, "--help")
    assert code == 0
    assert f"Usage: tinker-flows {command}" in " ".join(shown.split())
    for parameter in get_command(app).commands[command].params:  # pyright: ignore[reportAttributeAccessIssue]
        assert parameter.help, f"{command} {parameter.name}"


@pytest.mark.parametrize("method", METHODS)
def test_methods_resolve_to_flow_and_config(method: str) -> None:
    assert flow_of(method).name == method
    assert issubclass(config_type_of(method), NamedConfig)


def test_run_fields_lists_config_fields(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run_command(capsys, "run", "sft", "--fields")
    assert code == 0
    assert "  learning_rate=0.0001  Learning rate at the first step, or `auto`." in shown


@pytest.mark.parametrize("method", ["dpo", "rl", "on_policy_distillation"])
def test_run_fields_lists_the_base_loss_of_the_method(capsys: pytest.CaptureFixture[str], method: str) -> None:
    """The method rejects cross_entropy, the default of other methods."""
    _, shown, _ = run_command(capsys, "run", method, "--fields")
    (loss,) = re.findall(r"  objective\.base_loss=(\S*)  ", shown)
    assert loss == {"dpo": "dpo"}.get(method, "importance_sampling")


def test_regularizers_are_listed_with_kind_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run_command(capsys, "regularizers")
    assert code == 0
    for text in ("confidence", "differentiable", "auto", "alpha: float > 0 = 1.0", "Share of violated"):
        assert text in shown
    code, shown, _ = run_command(capsys, "regularizers", "--json")
    (logic,) = (term for term in json.loads(shown) if term["name"] == "logic")
    assert logic["estimator"] == "auto"
    assert {"name": "alpha", "type": "float > 0", "default": "1.0"}.items() <= logic["parameters"][-1].items()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "sfd"], "Unknown method 'sfd'; did you mean 'sft'? Use one of "),
        pytest.param(
            ["run", "sft", "--config", "absent.yaml"],
            "The config file absent.yaml could not be read",
            marks=pytest.mark.process,
        ),
        pytest.param(
            ["run", "sft", "model"], "The argument 'model' must have the form field=value", marks=pytest.mark.process
        ),
        (["resume", "absent"], "Run 'absent' does not exist in "),
        (["status", "absent"], "Run 'absent' does not exist in "),
        (["report", "absent"], "Run 'absent' does not exist in "),
    ],
)
def test_errors_a_user_can_fix_are_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    code, _, _ = run_command(capsys, *arguments)
    assert str(code).startswith(f"error: {sentence}")
    assert str(code).count("\n") == 0


def test_an_unknown_command_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run_command(capsys, "regularisers")
    assert code == 2
    assert "Did you mean 'regularizers'" in error


@pytest.mark.process
def test_a_shell_completes_commands_and_methods() -> None:
    for words, completion in (("tinker-flows reg", "regularizers"), ("tinker-flows run s", "sft")):
        result = subprocess.run(
            [Path(sys.executable).with_name("tinker-flows")],
            env={"_TINKER_FLOWS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert completion in result.stdout, result.stderr


def test_configs_may_name_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed command does not have the current folder on its import path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(("option", "overrides"), [([], []), (["--against", "b@1"], ['against="b@1"'])])
def test_compare_keeps_the_checkpoint_of_the_config(
    monkeypatch: pytest.MonkeyPatch, option: list[str], overrides: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("flows.runs.cli.start", lambda *args: started.append(args[3]))
    with pytest.raises(SystemExit):
        main(["compare", "a@1", "against=other@2", *option])
    assert started == [["against=other@2", 'checkpoint="a@1"', *overrides]]

"""Errors that end a script which imports the public namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
BAD_CONFIG = "from tinker_flows import SftConfig, load_config\nload_config(SftConfig, None, ['model'])\n"
BAD_TERM = "from tinker_flows import regularizer\nregularizer('x', kind='odd')\n"


def run_script(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "TINKER_FLOWS_HOME": str(folder / "home"), "PYTHONPATH": paths, **env}
    return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("code", "sentence"), [(BAD_CONFIG, "The argument 'model' must have the form"), (BAD_TERM, "Term 'x' declares")]
)
def test_a_known_error_is_one_sentence_with_its_traceback_in_a_file(tmp_path: Path, code: str, sentence: str) -> None:
    script = run_script(tmp_path, code)
    assert script.returncode == 1
    place, error = script.stderr.splitlines()
    assert error.startswith(f"error: {sentence}")
    (log,) = (tmp_path / "home" / "logs").iterdir()
    assert str(log) in place
    assert "Traceback" in log.read_text()
    assert "script.py" in log.read_text()


def test_a_variable_shows_the_traceback(tmp_path: Path) -> None:
    script = run_script(tmp_path, BAD_CONFIG, TINKER_FLOWS_TRACEBACK="1")
    assert script.returncode == 1
    assert script.stderr.startswith("Traceback")
    assert not (tmp_path / "home").exists()


def test_errors_of_the_script_itself_keep_their_traceback(tmp_path: Path) -> None:
    script = run_script(tmp_path, "import tinker_flows\n1 / 0\n")
    assert script.stderr.startswith("Traceback")
    assert "ZeroDivisionError" in script.stderr


def test_ctrl_c_says_how_to_continue(tmp_path: Path) -> None:
    script = run_script(tmp_path, "import tinker_flows\nraise KeyboardInterrupt\n")
    assert script.stderr.startswith("Stopped. Run the same script again")
    assert "Traceback" not in script.stderr
    assert script.returncode == 130


def test_a_hook_of_the_script_is_called_for_other_errors(tmp_path: Path) -> None:
    code = "import sys\nsys.excepthook = lambda *_: print('mine')\nimport tinker_flows\n1 / 0\n"
    assert run_script(tmp_path, code).stdout == "mine\n"

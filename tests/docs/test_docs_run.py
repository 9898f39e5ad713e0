"""Python fences and commands of README and docs run as written; YAML fences are valid; links and test names exist."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import PAGES, ROOT, Fence, copy_project, environment, fences, run_commands
from forked_program import start_program

from blocks.errors import TinkerFlowsError
from deployments.methods import METHODS
from flows.config.loader import load_config
from flows.evaluate import EvaluateConfig
from flows.sweeps.config import SweepConfig
from objectives.config.import_path import import_path

# Fences that the tests do not run, each marked on its page with the reason. A new one belongs in this list, too.
NOT_RUN = {
    "README.md": 2,
    "docs/benchmarks.md": 1,
    "docs/deployments.md": 6,
    "docs/engine.md": 1,
    "docs/events.md": 1,
    "docs/recipes.md": 1,
    "docs/reliability.md": 1,
    "docs/scale.md": 1,
    "docs/servers.md": 5,
}
COMMANDS = fences("bash")
PAGES_WITH_COMMANDS = sorted({fence.page for fence in COMMANDS if not fence.reason})
# Commands that end within seconds. `make test` runs them, and `make slow` all.
QUICK = ("tinker-flows estimate", "tinker-flows run sft --fields", "tinker-flows doctor")
# A page that uses the run `mine` without training it starts from this run.
MINE = "tinker-flows run sft --config examples/sft.yaml run_name=mine model=tiny num_steps=4 checkpoint_every=2"


@pytest.fixture(scope="session")
def copied_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh copy of the project for all Python fences; each has a home of its own."""
    return copy_project(tmp_path_factory.mktemp("docs") / "project")


@pytest.fixture
def fresh_project(tmp_path: Path) -> Path:
    """Fresh copy of the project for one page."""
    return copy_project(tmp_path / "project")


@pytest.mark.process
@pytest.mark.parametrize("fence", fences("python"), ids=lambda fence: fence.name)
def test_python_fence_runs(fence: Fence, copied_project: Path, tmp_path: Path, prefect_server: str) -> None:
    script = tmp_path / "fence.py"
    script.write_text(fence.code)
    variables = environment(copied_project, TINKER_FLOWS_HOME=str(tmp_path), PREFECT_API_URL=prefect_server)
    program = start_program([str(script)], variables, tmp_path / "fence.log", copied_project)
    assert program.wait(240) == 0, program.output()


@pytest.mark.process
def test_quick_commands_run(fresh_project: Path) -> None:
    lines = [line for fence in COMMANDS for line in fence.code.splitlines() if line.startswith(QUICK)]
    assert len(lines) >= len(QUICK)
    run_commands(fresh_project, lines, limit_s=240)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_commands_of_a_page_run(page: str, fresh_project: Path) -> None:
    """All commands of a page run in order in one shell, servers in the background, in a fresh copy of the project.

    Programs of the page come first, because commands may name their runs.
    """
    programs = [fence.code for fence in fences("python") if fence.page == page and "run_name=" in fence.code]
    code = [fence.code for fence in COMMANDS if fence.page == page and not fence.reason]
    text = "\n".join(code)
    if "mine" in text and "run_name=mine" not in text:
        code = [MINE, *code]
    run_commands(fresh_project, [*(f"python - <<'END'\n{program}\nEND" for program in programs), *code], limit_s=3600)


def test_fences_that_do_not_run_are_marked_and_counted() -> None:
    skipped = [fence for fence in COMMANDS if fence.reason]
    for fence in skipped:
        print(f"{fence.name}: {fence.reason}")
    assert Counter(fence.page for fence in skipped) == NOT_RUN


def _runs() -> list[Any]:
    """Commands that train with a config, as parameters of a test."""
    lines = [(fence.name, line) for fence in COMMANDS for line in fence.code.splitlines() if " --config " in line]
    return [
        pytest.param(shlex.split(line, comments=True), id=name)
        for name, line in lines
        if re.match(r"tinker-flows run|python -m flows\.", line)
    ]


@pytest.mark.parametrize("words", _runs())
def test_command_has_a_valid_config(words: list[str]) -> None:
    """Also of the commands that the tests do not run."""
    method = words[2].removeprefix("flows.")
    config_type: Any = import_path(METHODS[method].config)
    at = words.index("--config")
    load_config(config_type, ROOT / words[at + 1], words[at + 2 :])


@pytest.mark.parametrize("fence", fences("yaml"), ids=lambda fence: fence.name)
def test_yaml_fence_is_valid(fence: Fence, tmp_path: Path) -> None:
    """The fields of a fence, added to the example of some method or used alone, are a valid config."""
    fields = yaml.safe_load(fence.code)
    bases: list[tuple[Any, Path | None]] = [(SweepConfig, None), (EvaluateConfig, ROOT / "examples" / "evaluate.yaml")]
    for name, method in METHODS.items():
        example = ROOT / "examples" / f"{name}.yaml"
        if example.exists():
            bases.append((import_path(method.config), example))
    problems: list[str] = []
    for config_type, example in bases:
        file = tmp_path / "fence.yaml"
        file.write_text(yaml.safe_dump((yaml.safe_load(example.read_text()) if example else {}) | fields))
        try:
            load_config(config_type, file, [])
        except TinkerFlowsError as error:
            problems.append(f"{config_type.__name__}: {error}")
        else:
            return
    pytest.fail("\n".join(problems))


def test_relative_links_exist() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


def test_named_tests_exist() -> None:
    for path in PAGES:
        for name, target in re.findall(r"\[(test_\w+)\]\(([^)]+)\)", path.read_text()):
            assert f"def {name}(" in (path.parent / target).read_text(), (
                f"{path.name} names the test {name}, which {target} does not define"
            )

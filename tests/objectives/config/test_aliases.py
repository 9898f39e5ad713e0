"""Import paths of release 0.1 lead to the renamed objects."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flows.config.base import BuilderConfig
from flows.config.distill import QuestionsConfig, SelfConfig
from objectives.config.aliases import MODULES, NAMES, current_path, with_current_paths
from objectives.config.import_path import ImportedFunction, import_path

# Every module of release 0.1 with its public names, listed from its sources. The engine and the deployments are left
# out: a service and a command line, which nobody imports. So are the parts of the training loop, which is one class
# now, cancel_coroutines, which ended the work of other runs, the class PCGrad, which TorchJD's replaced, the static
# charts of the report, which are interactive now, the sandbox's fixed user id, which each sandbox now chooses, and the
# calls of terms through Dask and Ray, which Prefect's task runners replaced.
PUBLIC_PATHS: dict[str, list[str]] = json.loads((Path(__file__).parent / "data" / "public_paths_0_1.json").read_text())


@pytest.mark.parametrize("module", PUBLIC_PATHS)
def test_a_public_path_of_release_0_1_still_resolves(module: str):
    for name in PUBLIC_PATHS[module]:
        import_path(f"{module}:{name}")


# Modules that kept their path and that the docs of 0.1 imported from.
SHOWN = ("advantages", "term", "batch", "evaluate", "losses", "one_pass", "sdk")
PYTHON_IMPORTS = [
    *(module for module in PUBLIC_PATHS if module in MODULES),
    *(f"objectives.{name}" for name in SHOWN),
    "flows.config",
    "tasks.sandbox",
]


@pytest.mark.parametrize("module", PYTHON_IMPORTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_python_import_of_release_0_1_still_works(module: str):
    imported = importlib.import_module(module)
    for name in PUBLIC_PATHS[module]:
        assert getattr(imported, name) is import_path(f"{module}:{name}"), name


def test_every_alias_is_a_path_of_release_0_1_and_leads_to_a_module():
    assert MODULES.keys() <= PUBLIC_PATHS.keys()
    for path in NAMES:
        module, _, name = path.partition(":")
        assert name in PUBLIC_PATHS[module], path
    for module in MODULES.values():
        importlib.import_module(module)


@pytest.mark.process
@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("blocks.home", "home", "blocks.files.local"),
        ("flows.config_file", "load_config", "flows.config.loader"),
        ("objectives.form", "choose_term", "objectives.config.json_schema"),
        ("tasks.graders", "same_number", "tasks.common.graders"),
    ],
)
def test_a_renamed_module_warns(old: str, name: str, new: str):
    code = f"from {old} import {name}; print({name}.__module__)"
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == new
    assert f"{old} is now {new}" in run.stderr


def test_old_paths_in_a_config_are_replaced_at_any_depth():
    config = BuilderConfig(
        builder="tasks.given:given",
        params={"judge": {"builders": ["tasks.graders:same_number", "tasks.graders.same_number"]}, "note": "tasks"},
    )
    assert config.builder == "tasks.common.builders:default_params"
    new = "tasks.common.graders:same_number"
    assert config.params == {"judge": {"builders": [new, new]}, "note": "tasks"}


def test_renamed_parameters_of_a_builder_are_replaced():
    old = {"path": "rows.jsonl", "asked": "{question}", "shown": "{question} {answer}"}
    config = BuilderConfig(builder="tinker_flows:QuestionsBuilder", params=old)
    assert config.params == {
        "path": "rows.jsonl",
        "student_prompt": "{question}",
        "teacher_prompt": "{question} {answer}",
    }
    assert BuilderConfig(builder="other:Builder", params={"asked": "1"}).params == {"asked": "1"}


def test_renamed_fields_of_distillation_are_read_and_recorded_by_their_new_names():
    config = QuestionsConfig.model_validate({"path": "rows.jsonl", "asked": "{question}?"})
    assert config.student_prompt == "{question}?"
    assert "asked" not in config.model_dump()
    assert SelfConfig.model_json_schema()["properties"].keys() >= {"teacher_prompt"}


def test_other_paths_stay_as_they_are():
    assert current_path("my_project.rewards:Score") == "my_project.rewards:Score"
    assert with_current_paths({"text": "see tasks.graders: it is good", "n": 1}) == {
        "text": "see tasks.graders: it is good",
        "n": 1,
    }


@pytest.mark.parametrize("path", ["math:none", "no_such_module:name", "name_alone"])
def test_a_path_that_leads_nowhere_is_an_import_error(path: str):
    with pytest.raises(ImportError):
        import_path(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_old_module_does_not_hide_the_function_of_its_name():
    importlib.import_module("objectives.linearize")
    importlib.import_module("objectives.regularizer")
    objectives = importlib.import_module("objectives")
    assert objectives.linearize is import_path("objectives.gradients.linearize:linearize")
    assert objectives.regularizer is import_path("objectives.term:regularizer")


def test_the_fingerprint_of_an_earlier_path_depends_on_the_code() -> None:
    """A cache of features would otherwise outlive a change of the function."""
    earlier, current = ("tasks.answer:service_errors", "tasks.common.service_errors:service_errors")
    digests = {ImportedFunction(path).fingerprint().partition(" ")[2] for path in (earlier, current)}
    assert len(digests) == 1

"""Configs of deployments name only modules and commands that the operator of the worker allows."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Running
from prefect_deployments import wait_for_end
from sft_config import sft_fields

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from flows.config.flow_lookup import find_flow
from flows.config.train import SftConfig, TaskRunnerConfig
from flows.runs.rights import apply_rights, signature_tags
from flows.runs.task_runner import open_dask, open_ray
from objectives import Objective, ObjectiveError, ObjectiveSpec
from objectives.config.import_path import ImportedFunction
from objectives.config.import_policy import ALLOWED_MODULES, COMMANDS, find_command, is_restricted
from tasks.common.builders import build, takes
from tasks.evaluation.evaluators import build_evaluator
from tasks.evaluation.inspect_tasks import InspectTask
from tasks.evaluation.sampled import ExactMatch
from tasks.preference.judges import build_judge
from tasks.rl.rollout_source import build_environments
from tasks.rl.rollouts.custom_completer import CompleterSpec
from tasks.rl.rollouts.hooks import HookSpec
from tasks.sandbox.runner import Limits

ROOT = Path(__file__).parents[2]
ROWS = str(ROOT / "examples" / "data" / "gsm8k_test.jsonl")
TOKENIZER: Any = byte_tokenizer()
MODULE = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
import chz
from examples.gsm8k import Gsm8kBuilder

@chz.chz
class Builder(Gsm8kBuilder):
    pass

def function(*args, **params):
    return 0.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module of the user that leaves a file when it is imported."""
    name = f"users_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the process of a deployment's flow run."""
    for name in (ALLOWED_MODULES, COMMANDS, "TINKER_FLOWS_SIGNED_RUN", "TINKER_FLOWS_RESTRICTED_RUN"):
        monkeypatch.setenv(name, "")  # restored after the test, also if a flow run sets it
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))


def make_data(builder: str, **params: Any) -> Any:
    return build("data", builder, params, TOKENIZER, lambda instance: (instance(), None))


def make_environments(builder: str, **params: Any) -> Any:
    return build_environments(builder, params, TOKENIZER, {})


def make_term(path: str) -> Any:
    return Objective.from_spec(ObjectiveSpec.model_validate({"regularizers": [{"name": "mine", "fn": path}]}))


def make_simulation(scorer: str | list[str]) -> Objective:
    terms = [{"name": "simulation", "params": {"scorer": scorer}}]
    return Objective.from_spec(ObjectiveSpec.model_validate({"regularizers": terms}))


FIELDS: dict[str, Callable[[str], Any]] = {
    "data.builder": make_data,
    "data": lambda path: takes("data", path, {}, "session"),
    "environment.builder": make_environments,
    "nested": lambda path: make_environments(
        "tasks.rl.environments.pairwise:TournamentBuilder", comparison_builder=path, batch_size=1, group_size=2
    ),
    "evaluators.builder": lambda path: build_evaluator(path, {}),
    "judge.builder": lambda path: build_judge(path, {}),
    "judge.builder with params": lambda path: build_judge(path, {"cmd": "ls"}),
    "completer": lambda path: CompleterSpec.load(path, {}),
    "hook": lambda path: HookSpec.load(path, {}),
    "grader": lambda path: ExactMatch(path=ROWS, renderer_name="x", grader=path),
    "flow": find_flow,
    "term": make_term,
    "extractor": lambda path: ImportedFunction(path).load(),
    "simulation": make_simulation,
}


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", ["os:system", "subprocess:Popen", "timeit:timeit", "{module}:function"])
def test_a_module_that_is_not_named_is_not_even_imported(field: str, path: str, module: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=ALLOWED_MODULES):  # of this project, or of pydantic
        FIELDS[field](path.format(module=module))
    assert module not in sys.modules
    assert not (tmp_path / f"{module}.ran").exists()


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize(
    "value",
    ["{module}:Builder", "{module}.Builder", "lambda: __import__('{module}')", "lambda x:__import__('{module}')"],
)
def test_strings_in_nested_parameters_import_and_run_nothing(value: str, module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        FIELDS["nested"](value.format(module=module))
    assert not (tmp_path / f"{module}.ran").exists()


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize(
    "path",
    [
        "tasks.sandbox.runner:subprocess",
        "objectives.terms.text.simulation:ThreadPoolExecutor",
        "tasks.common.jsonl:read_rows",  # a function of this project, with parameters of the config
        "tasks.reports.html:html_page",
    ],
)
def test_allowed_modules_do_not_lend_their_functions_and_imports(path: str) -> None:
    for field in ("data.builder", "environment.builder", "nested", "evaluators.builder", "completer", "simulation"):
        with pytest.raises(ValueError, match=ALLOWED_MODULES):  # of this project, or of pydantic
            FIELDS[field](path)


@pytest.mark.usefixtures("restricted")
def test_own_modules_and_named_ones_are_allowed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes("data", "examples.gsm8k:Gsm8kBuilder", {}, "common_config")
    assert ExactMatch(path=ROWS, renderer_name="x").grader_function("4", "#### 4")
    assert build_judge("tasks.preference.judges:by_answer", {})
    assert find_flow("sft").module == "flows.sft"
    assert make_simulation("examples.term_data:miss").regularizers
    monkeypatch.setenv(ALLOWED_MODULES, f"acme, {module}")
    assert takes("data", f"{module}:Builder", {}, "common_config")
    assert ImportedFunction(f"{module}:function").load()() == 0.0
    assert HookSpec.load(f"{module}:function", {})
    with pytest.raises(ConfigError, match="may not import 'os:system'"):
        make_data("os:system", command="true")


def test_a_terminal_may_name_everything(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    monkeypatch.delenv(ALLOWED_MODULES, raising=False)
    assert takes("data", f"{module}:Builder", {}, "common_config")
    assert build_judge(f"{module}:function", {})
    assert make_simulation(["true"]).regularizers
    assert Limits(network="allow")


@pytest.mark.usefixtures("restricted")
def test_commands_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectiveError, match=f"name the command in {COMMANDS}"):
        make_simulation(["touch", "x"])
    with pytest.raises(ObjectiveError, match=f"no command 'touch' in {COMMANDS}, which has no commands: add it"):
        make_simulation("touch")
    monkeypatch.setenv(COMMANDS, json.dumps({"touch": ["touch", "y"]}))
    assert make_simulation("touch").regularizers[0].params["scorer"] == ("touch", "y")
    for malformed in ('{"touch": "touch y"', '{"touch": "touch y"}', '{"touch": {"touch": "y"}}'):
        monkeypatch.setenv(COMMANDS, malformed)
        with pytest.raises(ObjectiveError, match=f"{COMMANDS} is malformed"):
            find_command("touch")
    with pytest.raises(ConfigError, match="runs code without isolation"):
        Limits(network="allow")


@pytest.mark.usefixtures("restricted")
def test_inspect_tasks_are_no_files_of_code(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    for task in (str(tmp_path / "task.py"), "task.py@mine", "tinker_cookbook/../task.py", "inspect_evals/gsm8k"):
        with pytest.raises(ValueError, match=ALLOWED_MODULES):
            InspectTask(task=task, renderer_name="x")


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize("field", ["grader", "extractor"])
def test_functions_of_another_purpose_are_not_called_with_texts(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one imports the module that its argument names."""
    path = "tinker_cookbook.recipes.chat_sl.sweep.cli:get_recipe"
    with pytest.raises(ValueError, match=r"may not call .* with texts"):
        FIELDS[field](path)
    FIELDS[field]("tasks.common.graders:same_number")
    monkeypatch.setenv(ALLOWED_MODULES, "tinker_cookbook.recipes.chat_sl.sweep.cli")
    FIELDS[field](path)


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("evaluators.builder", "tinker_cookbook.eval.inspect_evaluators:InspectEvaluatorBuilder"),
        ("evaluators.builder", "tinker_cookbook.eval.run_inspect_evals:Config"),
        ("environment.builder", "tinker_cookbook.recipes.verifiers_rl.verifiers_env:VerifiersRLDatasetBuilder"),
        ("nested", "tinker_cookbook.recipes.verifiers_rl.verifiers_env:VerifiersRLDatasetBuilder"),
    ],
)
def test_classes_of_the_cookbook_that_load_named_code_are_not_imported(
    field: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = path.partition(":")[0]
    with pytest.raises(ConfigError, match=f"may not import .*add the module '{module}' to {ALLOWED_MODULES}"):
        FIELDS[field](path)
    monkeypatch.setenv(ALLOWED_MODULES, module)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        FIELDS[field](path)
    assert ALLOWED_MODULES not in str(caught.value), "the module is allowed, but its library is not installed"


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize(
    ("kind", "connect", "variable"),
    [("dask", open_dask, "DASK_SCHEDULER_ADDRESS"), ("ray", open_ray, "RAY_ADDRESS")],
)
def test_only_the_worker_names_a_cluster(
    kind: Any, connect: Callable[[TaskRunnerConfig], Any], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of Dask unpickles what the scheduler sends, so the run must not connect to the listener at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        address = f"{'tcp' if kind == 'dask' else 'ray'}://127.0.0.1:{listener.getsockname()[1]}"
        for of_worker in ("", "tcp://127.0.0.1:1"):
            monkeypatch.setenv(variable, of_worker)
            with pytest.raises(ConfigError, match=f"set {variable} of the worker") as caught:
                connect(TaskRunnerConfig(kind=kind, address=address)).__enter__()
            assert address in str(caught.value)
        with pytest.raises(TimeoutError):
            listener.accept()
    monkeypatch.setenv(variable, address)
    monkeypatch.setitem(sys.modules, f"prefect_{kind}", None)
    with pytest.raises(ConfigError, match=f"needs the extra '{kind}'"):  # the check has passed
        connect(TaskRunnerConfig(kind=kind, address=address)).__enter__()


TOKENIZER_CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast

class Mine(PreTrainedTokenizerFast):
    pass
"""


def first_batch(tokenizer: Path) -> list[Any]:
    rows = tokenizer / "rows.jsonl"
    message = {"role": "user", "content": "2 + 2?"}
    rows.write_text(json.dumps({"messages": [message, {"role": "assistant", "content": "4"}]}) + "\n")
    common: dict[str, Any] = {"renderer_name": "role_colon", "batch_size": 1, "max_length": 100}
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    common |= {"model_name_for_tokenizer": str(tokenizer)}
    (dataset, _), _ = make_data(builder, file_path=str(rows), common_config=common)
    return dataset.get_batch(0)


@pytest.mark.parametrize("needs_code", [True, False])
def test_only_a_terminal_runs_the_code_of_a_tokenizer(
    needs_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A form can name any folder of the worker's machine, such as one that a neighbour fills."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    marker = tmp_path / "ran"
    folders = [tmp_path / f"folder_{uuid4().hex}" for _ in range(2)]
    for folder in folders:
        byte_tokenizer().save_pretrained(folder)
        if needs_code:
            config = folder / "tokenizer_config.json"
            auto_map = {"AutoTokenizer": [None, "mine.Mine"]}
            options = json.loads(config.read_text()) | {"tokenizer_class": "Mine", "auto_map": auto_map}
            config.write_text(json.dumps(options))
            (folder / "mine.py").write_text(TOKENIZER_CODE.format(marker=str(marker)))
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    assert first_batch(folders[0])
    assert marker.exists() == needs_code
    marker.unlink(missing_ok=True)
    request.getfixturevalue("restricted")
    if needs_code:
        with pytest.raises(ObjectiveError, match="needs the code in its folder"):
            first_batch(folders[1])
    else:
        assert first_batch(folders[1])
    assert not marker.exists()


@flow(name="sft")
def signed_flow(config: dict[str, Any]) -> None:
    pass


@pytest.mark.usefixtures("restricted")
def test_a_signature_is_valid_for_its_config_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    config = {"learning_rate": 1e-05, "data": {"builder": "mine:Builder"}}
    assert signature_tags("sft", config) == [], "a form's sweep has no rights to hand over"
    with monkeypatch.context() as terminal:
        terminal.delenv("PREFECT__FLOW_RUN_ID")
        tags = signature_tags("sft", config)
        other_flow = signature_tags("dpo", config)
    key = tmp_path / "handover.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600

    def accept(config: dict[str, Any], tags: list[str]) -> bool:
        run_id = uuid4()
        run = FlowRun(id=run_id, flow_id=uuid4(), deployment_id=uuid4(), parameters={"config": config}, tags=tags)
        apply_rights(signed_flow, run, Running())
        return not is_restricted()

    assert accept(json.loads(json.dumps(config)), tags)
    assert not accept(config | {"data": {"builder": "os:system"}}, tags)
    assert not accept(config, other_flow)
    assert not accept(config, ["tinker-flows:signed:"])
    assert not accept(config, [])
    key.unlink()
    assert not accept(config, tags), "another home has another key"


SERVE = "from flows.sft import sft; sft.serve(name='policy', print_starting_message=False)"


def test_runs_of_a_deployment(
    module: str, tmp_path: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form may not name the user's module; the trial of a sweep from a terminal may."""
    monkeypatch.delenv(ALLOWED_MODULES, raising=False)
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    fields = sft_fields(tmp_path, "from-a-form", f"sqlite:///{tmp_path}/mlflow.db", engine_url)
    data: dict[str, Any] = {**fields["data"], "builder": f"{module}:Builder"}
    fields = {**fields, "num_steps": 1, "eval_every": 0, "data": data}
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    service = {"TINKER_BASE_URL": engine_url, "TINKER_API_KEY": "tml-test"}
    environment = os.environ | {"PREFECT_API_URL": prefect_server, "PYTHONPATH": paths, **service}
    serving = subprocess.Popen([sys.executable, "-c", SERVE], env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        with get_client(sync_client=True) as client:
            while not (found := [d for d in client.read_deployments() if d.name == "policy"]):
                assert serving.poll() is None
            config = SftConfig.model_validate(fields).model_dump(mode="json")
            form = client.create_flow_run_from_deployment(found[0].id, parameters={"config": config})
            state = wait_for_end(form.id).state
            assert state
            assert state.is_failed()
            assert ALLOWED_MODULES in (state.message or "")
            assert not (tmp_path / f"{module}.ran").exists()
            config["run_name"] = "from-a-terminal"
            tags = signature_tags("sft", config)
            trial = client.create_flow_run_from_deployment(found[0].id, parameters={"config": config}, tags=tags)
            state = wait_for_end(trial.id).state
            assert state
            assert state.is_completed(), state.message
    finally:
        serving.terminate()
        serving.wait(60)

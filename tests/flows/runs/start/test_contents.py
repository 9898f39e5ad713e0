"""Resumed runs whose data, code, model or tokenizer has changed since the last checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

import pytest
from cookbook_sft import write_builder_params
from engine_process import API_KEY
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter, EventNameFilter
from rl_config import rl_fields
from sft_config import sft_fields
from tinker_cookbook.tokenizer_utils import get_tokenizer

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from flows.config.distill import OnPolicyConfig
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.monitoring.drain import deliver_events
from flows.monitoring.run_tags import ACCEPTED_EVENT
from flows.runs.result import TrainResult
from flows.runs.start.contents import digest_contents
from flows.sft import sft
from objectives.objective import Objective
from tasks.common.digests import changed_contents, digest_code

pytestmark = pytest.mark.usefixtures("prefect_server")
NUM_STEPS = 4
TERM = """from contents_helper import SCALE
from tinker_flows import regularizer

@regularizer("contents_term")
def contents_term(outputs, batch):
    return outputs.logprobs_DT.exp() * SCALE * 1.0
"""
HELPER = "SCALE = 0.5\n"
EVALUATOR = """from tinker_cookbook.eval.evaluators import TrainingClientEvaluator

class One(TrainingClientEvaluator):
    async def __call__(self, training_client):
        return {"one": 1.0}
"""


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the user's project, with a term, a module that the term imports, and an evaluator."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", API_KEY)
        patch.syspath_prepend(str(folder))
        write_project(folder)
        yield folder
    for name in ("contents_helper", "contents_terms", "contents_evaluator"):
        sys.modules.pop(name, None)


def write_project(folder: Path) -> None:
    (folder / "contents_helper.py").write_text(HELPER)
    (folder / "contents_terms.py").write_text(TERM)
    (folder / "contents_evaluator.py").write_text(EVALUATOR)
    params = write_builder_params(folder, NUM_STEPS)
    (folder / "params.json").write_text(json.dumps(params))


@pytest.fixture(scope="module")
def fields(project: Path, mlflow_uri: str, engine_url: str) -> dict[str, Any]:
    params = json.loads((project / "params.json").read_text())
    return sft_fields(project, "contents", mlflow_uri, engine_url) | {
        "num_steps": NUM_STEPS,
        "eval_every": 0,
        "checkpoint_every": 2,
        "data": {"builder": "examples.gsm8k:Gsm8kBuilder", "params": params},
        "objective": {"regularizers": [{"name": "mine", "fn": "contents_terms:contents_term", "weight": 0.1}]},
        "evaluators": [{"builder": "contents_evaluator:One"}],
    }


@pytest.fixture(scope="module")
def finished(prefect_server: str, fields: dict[str, Any]) -> tuple[TrainResult, str]:
    """Run with checkpoints at the steps 2 and 4, and its record."""
    result = sft(SftConfig.model_validate(fields))
    return result, (Path(result.directory) / "checkpoints.jsonl").read_text()


@pytest.fixture
def resume(
    finished: tuple[TrainResult, str], project: Path, fields: dict[str, Any]
) -> Iterator[Callable[..., TrainResult]]:
    """Resume the run from its first checkpoint, as if it had been killed after it."""
    result, record = finished
    file = Path(result.directory) / "checkpoints.jsonl"
    file.write_text(record.splitlines(keepends=True)[0])
    yield lambda **changes: sft(SftConfig.model_validate(fields | changes))
    write_project(project)


def rewrite(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def other_answers(project: Path) -> None:
    rows = [json.loads(line) for line in (project / "rows.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"answer": "So " + row["answer"]}) for row in rows]
    (project / "rows.jsonl").write_text("\n".join(lines))


CHANGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "data": (other_answers, "data", r"data \(.*rows\.jsonl, the batch of step 1\)"),
    "term": (
        lambda project: rewrite(project / "contents_terms.py", "* 1.0", "* -50.0"),
        "terms",
        r"terms \(mine\)",
    ),
    "module of a term": (
        lambda project: rewrite(project / "contents_helper.py", "0.5", "0.7"),
        "terms",
        r"terms \(mine\)",
    ),
    "evaluator": (
        lambda project: rewrite(project / "contents_evaluator.py", "1.0}", "2.0}"),
        "evaluators",
        r"evaluators \(contents_evaluator:One\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_content_is_refused_unless_it_is_accepted(
    resume: Callable[..., TrainResult],
    project: Path,
    finished: tuple[TrainResult, str],
    mlflow_uri: str,
    change: str,
) -> None:
    alter, kind, described = CHANGES[change]
    alter(project)
    with pytest.raises(
        ConfigError, match=rf"{described} has changed since .*at step 2: .* accept_changes to \[{kind}\]"
    ):
        resume()
    with pytest.raises(ConfigError, match="has changed since"):
        resume(accept_changes=["model"])
    result = resume(accept_changes=[kind])
    assert (result.resumed_from, result.num_steps) == (2, NUM_STEPS)
    run = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id)
    text = run.data.tags[f"tinker_flows.warning.accepted.{kind}"]
    assert text.endswith("has changed at step 2, as accept_changes allows.")
    assert text in result.warnings
    assert text.split(" (")[0] in (Path(result.directory) / "report.html").read_text()
    deliver_events()
    with get_client(sync_client=True) as prefect:
        query = {"filter": EventFilter(event=EventNameFilter(name=[ACCEPTED_EVENT])).model_dump(mode="json")}
        events = prefect._client.post("/events/filter", json=query).json()["events"]
    assert any(event["payload"]["kind"] == kind for event in events)
    # The new checkpoint has the digests of the new content.
    assert resume().resumed_from == NUM_STEPS


def test_unchanged_content_is_recorded_with_every_checkpoint(
    resume: Callable[..., TrainResult], finished: tuple[TrainResult, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed run has the digests of an uninterrupted one; other versions and cadences are announced."""
    before = [json.loads(line)["contents"] for line in finished[1].splitlines()]
    again = resume(checkpoint_every=4)
    after = [
        json.loads(line)["contents"] for line in (Path(again.directory) / "checkpoints.jsonl").read_text().splitlines()
    ]
    assert after == before
    assert before[0]["datums"] != before[1]["datums"]
    assert set(before[0]["digests"]) == {"data", "terms", "evaluators", "tokenizer"}
    assert set(before[0]["versions"]) == {"tinker-flows", "tinker", "torch", "tinker-cookbook"}
    assert "contents continues with another checkpoint_every 4 (was 2)." in capfd.readouterr().err

    file = Path(again.directory) / "checkpoints.jsonl"
    record = json.loads(finished[1].splitlines()[0])
    record["contents"]["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(record) + "\n")
    again = resume()
    (warning,) = [text for text in again.warnings if "other versions" in text]
    assert "instead of 1.0" in warning


def test_record_without_digests_is_announced(
    resume: Callable[..., TrainResult], project: Path, finished: tuple[TrainResult, str]
) -> None:
    file = Path(finished[0].directory) / "checkpoints.jsonl"
    record = json.loads(finished[1].splitlines()[0])
    del record["contents"]
    file.write_text(json.dumps(record) + "\n")
    other_answers(project)
    again = resume()
    assert any("has no digests of its data and code" in text for text in again.warnings)
    assert json.loads(file.read_text().splitlines()[-1])["contents"]["digests"]["data"]


def test_digests_of_code_in_the_first_format_are_announced(
    resume: Callable[..., TrainResult], project: Path, finished: tuple[TrainResult, str]
) -> None:
    """They depended on what had been imported, so they are not compared; those of files are."""
    file = Path(finished[0].directory) / "checkpoints.jsonl"
    record = json.loads(finished[1].splitlines()[0])
    contents = record["contents"]
    del contents["format"]
    for kind in ("terms", "evaluators"):
        contents["digests"][kind] = dict.fromkeys(contents["digests"][kind], "0123456789abcdef")
    contents["digests"]["data"]["examples.gsm8k:Gsm8kBuilder"] = "0123456789abcdef"
    text = json.dumps(record) + "\n"
    file.write_text(text)
    other_answers(project)
    with pytest.raises(ConfigError, match=r"The content of data \(.*rows\.jsonl.*\) has changed"):
        resume()
    write_project(project)
    file.write_text(text)
    again = resume()
    assert any("has digests of code in another format" in warning for warning in again.warnings)
    assert json.loads(file.read_text().splitlines()[-1])["contents"]["format"] == 2


def test_noise_in_the_weights_and_permuted_token_ids_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text("{}")
    config = SftConfig.model_validate(sft_fields(tmp_path / "runs", "noisy", "") | {"model": str(tmp_path)})
    tokenizer: Any = byte_tokenizer()
    with Objective() as objective:
        before = digest_contents(config, objective, tokenizer)
        assert set(before) == {"data", "model", "tokenizer"}
        assert set(before["tokenizer"]) == {"tokenizer", "renderer qwen3_instruct"}
        tokenizer.encode("a", truncation=True, max_length=1)  # which changes the state of a fast tokenizer
        assert changed_contents(before, digest_contents(config, objective, tokenizer)) == {}

        (tmp_path / "model.safetensors").write_bytes(bytes(999) + b"\x01")
        now = digest_contents(config, objective, tokenizer)
        assert changed_contents(before, now) == {"model": [str(tmp_path)]}

        unreadable = tmp_path / "unreadable.safetensors"
        unreadable.symlink_to("/proc/self/mem")  # whose first page cannot be read, not even by root
        with pytest.raises(ConfigError, match=r"Cannot read the model folder .*: make all its files readable"):
            digest_contents(config, objective, tokenizer)
        unreadable.unlink()

        fields = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = fields["model"]["vocab"]
        first, second = list(vocabulary)[65:67]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(fields))
        permuted = digest_contents(config, objective, tokenizer)
        assert changed_contents(now, permuted)["tokenizer"][-1] == "tokenizer"


def test_folders_of_other_models_are_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References, teachers and the models of judges."""
    for name in ("reference", "teacher", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"a")
    judge = {"model": str(tmp_path / "judge")}
    sft_config = SftConfig.model_validate(
        sft_fields(tmp_path / "runs", "others", "")
        | {
            "reference": str(tmp_path / "reference"),
            "evaluators": [{"builder": "a:B", "params": judge}],
            "objective": {"regularizers": [{"name": "kl"}]},
        }
    )
    teacher = {
        "environment": {"builder": "examples.gsm8k:Gsm8kBuilder"},
        "teacher": {"model": str(tmp_path / "teacher")},
    }
    monkeypatch.chdir(tmp_path / "teacher")  # which an empty text does not name
    distill_config = OnPolicyConfig.model_validate({"run_name": "taught", "model": "tiny", "datasets": [teacher]})
    for config, names in ((sft_config, ["judge", "reference"]), (distill_config, ["teacher"])):
        with Objective() as objective:
            before = digest_contents(config, objective, cast(Any, byte_tokenizer()))
            for name in names:
                (tmp_path / name / "model.safetensors.index.json").write_text("{}")
            after = digest_contents(config, objective, cast(Any, byte_tokenizer()))
        paths = [str(tmp_path / name) for name in names]
        assert sorted(before["model"]) == paths
        assert changed_contents(before, after) == {"model": paths}


def test_changed_files_of_a_folder_of_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder may write other files to the folder, such as a cache or a log; a term's name names no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "results.json").write_text("1")
    (folder := tmp_path / "rows").mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.parquet"):
        (folder / name).write_text("1")
    fields = sft_fields(tmp_path / "runs", "folders", "")
    fields["data"]["params"] = {"path": str(folder)}
    config = SftConfig.model_validate(fields)
    with Objective() as objective:
        before = digest_contents(config, objective, cast(Any, byte_tokenizer()))
        (tmp_path / "topology" / "results.json").write_text("2")
        for name in ("b.jsonl", "new.jsonl", "log.out"):
            (folder / name).write_text("2")
        after = digest_contents(config, objective, cast(Any, byte_tokenizer()))
    assert set(before["data"]) >= {str(folder / name) for name in ("a.jsonl", "b.jsonl", "c.parquet")}
    assert changed_contents(before, after) == {"data": [str(folder / "b.jsonl")]}


def test_code_of_rewards_hooks_and_critics_belongs_to_the_environment(tmp_path: Path) -> None:
    for module in ("examples.letters", "rollout_parts"):
        import_module(module)  # as a run imports what it uses
    hook, features = "rollout_parts:charge_even_tokens", "rollout_parts:describe_prompt"
    fields = rl_fields(tmp_path, "hooked", "") | {
        "rollout": {"hook": {"builder": hook}},
        "advantage": {"estimator": "gae", "critic": {"features": features}},
    }
    with Objective() as objective:
        digests = digest_contents(RlConfig.model_validate(fields), objective, cast(Any, byte_tokenizer()))
    assert set(digests["environment"]) == {"examples.letters:LettersBuilder", hook, features}


def test_code_is_the_module_and_what_it_imports_from_the_project(project: Path) -> None:
    """Installed packages count by their version, the code of this project by its own."""
    import contents_evaluator  # pyright: ignore[reportMissingImports]
    import contents_terms  # pyright: ignore[reportMissingImports]

    term = contents_terms.contents_term.evaluate
    before, other = digest_code(term), digest_code(contents_evaluator.One)
    assert before != other
    rewrite(project / "contents_helper.py", "0.5", "0.6")
    assert digest_code(term) != before
    assert digest_code(contents_evaluator.One) == other
    write_project(project)
    assert digest_code(term) == before
    assert digest_code(get_tokenizer) == f"tinker_cookbook {version('tinker_cookbook')}"
    assert digest_code(json.dumps) == "json"
    assert digest_code(sft) is None


def test_an_installed_copy_of_this_project_is_no_code_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade of the project is a change of its version, which is announced, and not one of the terms."""
    folder = tmp_path / "site-packages"
    (folder / "tinker_flows").mkdir(parents=True)
    (folder / "tinker_flows" / "copied.py").write_text("def term(): ...\n")
    spec = spec_from_file_location("tinker_flows.copied", folder / "tinker_flows" / "copied.py")
    assert spec
    assert spec.loader
    copied = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tinker_flows.copied", copied)
    spec.loader.exec_module(copied)
    monkeypatch.setattr("tasks.common.digests._PROJECT", folder)
    assert digest_code(copied.term) is None


def test_the_packages_of_an_imported_module_count(project: Path) -> None:
    package = project / "parent_package"
    package.mkdir()
    (package / "__init__.py").write_text("SCALE = 1.0\n")
    (package / "child.py").write_text("from parent_package.leaf import value\n\n\ndef term(): return value\n")
    (package / "leaf.py").write_text("value = 1\n")
    term = import_module("parent_package.child").term
    before = digest_code(term)
    (package / "__init__.py").write_text("SCALE = 2.0\n")
    assert digest_code(term) != before


def test_imports_inside_functions_count_before_and_after_the_first_call(project: Path) -> None:
    """Their modules and packages are found without running any of them."""
    package = project / "lazy_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported by a digest')\n")
    (package / "inner" / "leaf.py").write_text("from ..other import OFFSET\n")  # inner is a namespace package
    (package / "other.py").write_text("OFFSET = 1\n")
    (project / "lazy_helper.py").write_text("SCALE = 1.0\n")
    (project / "lazy_term.py").write_text(
        "def term():\n    from lazy_helper import SCALE\n    return SCALE\n\n\n"
        "def other():\n    import lazy_package.inner.leaf\n"
    )
    term = import_module("lazy_term").term
    before = digest_code(term)
    assert "lazy_helper" not in sys.modules
    assert term() == 1.0
    assert "lazy_helper" in sys.modules
    assert digest_code(term) == before

    del sys.modules["lazy_helper"]
    digests = {before}
    for file, text in (
        (project / "lazy_helper.py", "SCALE = -50.0\n"),
        (package / "__init__.py", "raise ValueError('imported by a digest')\n"),
        (package / "inner" / "leaf.py", "from ..other import OFFSET as SHIFT\n"),
        (package / "other.py", "OFFSET = 2\n"),
        (package / "other.py", "this is (no Python\n"),
    ):
        file.write_text(text)
        digests.add(digest_code(term))
    assert len(digests) == 6
    assert not {"lazy_helper", "lazy_package"} & sys.modules.keys()

"""Run names in use: the earlier run is resumed, deleted, or the user is asked."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
import yaml
from engine_process import API_KEY, EngineProcess
from mlflow import MlflowClient
from rlhf_config import rlhf_fields
from saved_weights import saved_weights
from sft_config import sft_fields
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import RunStorage
from blocks.errors import ConfigError, ExplainedInterrupt, StorageError
from blocks.files.local_directory import LocalDirectory
from deployments.run_lookup import find_run, resume_config
from flows.config.distill import OnPolicyConfig
from flows.config.loader import validate_fields
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.distill import on_policy_distillation
from flows.monitoring.progress import step_callback
from flows.runs import cli
from flows.runs.result import TrainResult
from flows.sft import sft
from flows.sweeps.config import SweepConfig
from flows.sweeps.plan import make_plan


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)


@pytest.fixture
def fields(tmp_path: Path, mlflow_uri: str, engine_url: str) -> dict[str, Any]:
    return sft_fields(tmp_path, "run", mlflow_uri, engine_url) | {"num_steps": 3, "eval_every": 0, "objective": {}}


@pytest.fixture
def earlier(prefect_server: str, fields: dict[str, Any]) -> TrainResult:
    """Run with checkpoints at the steps 2 and 3."""
    return train(fields)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(fields: dict[str, Any], **changes: object) -> TrainResult:
    return sft(SftConfig.model_validate(fields | changes))


def contents(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.name != ".lock"}


def stage_of(mlflow_uri: str, run_id: str) -> str:
    return MlflowClient(mlflow_uri).get_run(run_id).info.lifecycle_stage


def test_deleted_run_leaves_no_trace(
    earlier: TrainResult,
    fields: dict[str, Any],
    mlflow_uri: str,
    engine: EngineProcess,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run after it equals a run of another name with the same settings."""
    (Path(earlier.directory) / "leftover").mkdir()
    (Path(earlier.directory) / "leftover" / "file.txt").write_text("old")
    names = sorted(path.name for path in Path(earlier.directory).iterdir() if path.name != ".lock")
    capfd.readouterr()
    changes = {"learning_rate": 1e-3, "data": fields["data"], "num_steps": 2}
    again = train(fields, if_exists="delete", **changes)
    assert (again.resumed_from, again.num_steps) == (0, 2)
    message = capfd.readouterr().err
    assert f"Deleted the earlier run 'run': {len(names)} files in {earlier.directory}" in message
    assert all(name in message for name in names)
    assert f"mlflow runs restore --run-id {earlier.mlflow_run_id}" in message
    assert "The weights of its checkpoints at the steps 2, 3 stay on the service." in message
    assert stage_of(mlflow_uri, earlier.mlflow_run_id) == "deleted"
    assert stage_of(mlflow_uri, again.mlflow_run_id) == "active"
    assert not (Path(again.directory) / "leftover").exists()
    rest = tinker.RestClient(base_url=engine.url, api_key=API_KEY)
    on_service = {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints}
    assert earlier.state_path in on_service

    fresh = train(fields, run_name="fresh", **changes)
    assert saved_weights(engine.state, again.state_path) == saved_weights(engine.state, fresh.state_path)
    assert contents(again.directory).keys() == contents(fresh.directory).keys()
    lines = (Path(again.directory) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_an_interrupted_deletion_is_continued(
    earlier: TrainResult, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that the deleted run skipped would otherwise be skipped in the new one."""
    folder = Path(earlier.directory)
    (folder / "guards.jsonl").write_text('{"step": 0, "kind": "spike", "policy": "skip"}\n')
    remove, removed = LocalDirectory.remove, list[str]()

    def remove_until_guards(directory: LocalDirectory, name: str) -> None:
        if "guards.jsonl" in removed:
            raise StorageError("The disk is gone: mount it.")
        removed.append(name)
        remove(directory, name)

    monkeypatch.setattr(LocalDirectory, "remove", remove_until_guards)
    with pytest.raises(StorageError, match="The disk is gone"):
        train(fields, if_exists="delete")
    monkeypatch.setattr(LocalDirectory, "remove", remove)
    assert removed[0] == "checkpoints.jsonl", "the next start must not continue from it"
    left = contents(earlier.directory)
    assert "config.json" in left, "the next deletion finds the other files by it"
    (folder / "zzz.jsonl").write_text("{}")
    assert train(fields, if_exists="delete").resumed_from == 0
    assert not (folder / "zzz.jsonl").exists()


def test_run_in_progress_is_never_deleted(earlier: TrainResult, fields: dict[str, Any], mlflow_uri: str) -> None:
    before = contents(earlier.directory)
    storage = RunStorage(url=fields["storage"])
    with storage.run_directory("run"), pytest.raises(StorageError, match="is being written by"):
        train(fields, if_exists="delete")
    assert contents(earlier.directory) == before
    assert stage_of(mlflow_uri, earlier.mlflow_run_id) == "active"


def test_ask(earlier: TrainResult, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(earlier.directory)
    monkeypatch.setattr("sys.stdin", io.StringIO("delete\n"))
    with pytest.raises(ConfigError, match="if_exists is 'ask', but there is no terminal to ask in: set if_exists to"):
        train(fields, if_exists="ask")
    for answer in ("exit\n", "what\nexit\n", ""):  # the last is Ctrl-D
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        with pytest.raises(ConfigError, match="was left as it is: choose another run_name"):
            train(fields, if_exists="ask")
    assert contents(earlier.directory) == before
    monkeypatch.setattr("sys.stdin", Terminal("yes\nresume\n"))
    assert train(fields, if_exists="ask").resumed_from == 3
    (Path(earlier.directory) / "config.json").write_text("damaged")
    monkeypatch.setattr("sys.stdin", Terminal("delete\n"))
    again = train(fields, if_exists="ask")
    assert again.resumed_from == 0
    assert again.mlflow_run_id != earlier.mlflow_run_id
    monkeypatch.setattr("sys.stdin", Terminal(""))  # a new name asks nothing
    assert train(fields, if_exists="ask", run_name="other").resumed_from == 0


def test_retried_flow_run_resumes_its_own_run(earlier: TrainResult, fields: dict[str, Any], mlflow_uri: str) -> None:
    failed_at: list[int] = []

    def fail_once(step: int, metrics: Mapping[str, float]) -> str:
        if step == 4 and not failed_at:
            failed_at.append(step)
            raise RuntimeError("crash")
        return ""

    config = SftConfig.model_validate(fields | {"if_exists": "delete", "num_steps": 6})
    with step_callback(fail_once):
        again = sft.with_options(retries=1)(config)
    assert failed_at == [4]
    assert again.resumed_from == 4
    assert stage_of(mlflow_uri, earlier.mlflow_run_id) == "deleted"


def test_origin_is_checked_before_anything_is_deleted(earlier: TrainResult, fields: dict[str, Any]) -> None:
    before = contents(earlier.directory)
    for origin, message in {
        "run@final": "a checkpoint of the run to delete",
        "gone": "the run 'gone' has no checkpoint",
    }.items():
        with pytest.raises(ConfigError, match=message):
            train(fields, if_exists="delete", init_from=origin)
    places = {key: fields[key] for key in ("run_name", "model", "base_url", "engine", "storage", "tracking")}
    environment = {"builder": "examples.letters:LettersBuilder"}
    datasets = [{"environment": environment, "teacher": {"checkpoint": "run@final"}}]
    config = OnPolicyConfig.model_validate({**places, "if_exists": "delete", "datasets": datasets})
    with pytest.raises(ConfigError, match="a teacher's checkpoint is 'run@final', a checkpoint of the run to delete"):
        on_policy_distillation(config)
    assert contents(earlier.directory) == before


def test_resume_command_never_deletes(earlier: TrainResult, fields: dict[str, Any]) -> None:
    train(fields, if_exists="delete", num_steps=1)
    method, config = resume_config(find_run("run", fields["storage"]), [])
    assert isinstance(config, SftConfig)
    assert (method, config.if_exists) == ("sft", "resume")


def test_ctrl_c_during_imports_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_prefect_server", nullcontext)

    def import_again(_: object) -> str:
        raise AttributeError("partially initialized module 'mlflow' has no attribute 'version'")

    monkeypatch.setattr(cli, "_check_resumption", interrupt)
    monkeypatch.setattr(cli, "_how_to_continue", import_again)
    config = validate_fields(SftConfig, sft_fields(tmp_path, "run", ""))
    with pytest.raises(ExplainedInterrupt):
        cli.run(sft, config)
    assert capsys.readouterr().err == "Stopped. The run had not started: the same command starts it.\n"


def test_a_run_in_progress_is_rejected_early(tmp_path: Path) -> None:
    config = validate_fields(SftConfig, sft_fields(tmp_path, "run", ""))
    with RunStorage(url=config.storage).run_directory("run"), pytest.raises(StorageError, match="is being written by"):
        cli._check_resumption(config)


def test_a_lease_does_not_reject_a_run_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a writer that was killed on another machine looks alive; the run itself waits and takes it over."""
    leased = SimpleNamespace(writer=lambda: "process 5 on elsewhere", read_bytes=lambda name: None, location="s3://x")
    storage = SimpleNamespace(run_directory=lambda name: leased)
    monkeypatch.setattr("flows.runs.blocks.storage_of", lambda config: storage)
    cli._check_resumption(validate_fields(SftConfig, sft_fields(tmp_path, "run", "")))


def test_interrupted_run_names_the_command_that_does_not_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_prefect_server", nullcontext)
    monkeypatch.setattr(cli, "_run", interrupt)
    for if_exists, same in (("delete", "starts over"), ("ask", "asks what to do with the run")):
        config = validate_fields(SftConfig, sft_fields(tmp_path, "run", "") | {"if_exists": if_exists})
        with pytest.raises(ExplainedInterrupt):
            cli.run(sft, config)
        assert capsys.readouterr().err == f"Stopped. run has no checkpoint yet: the same command {same}.\n"
    storage = tmp_path / "runs"
    (storage / "run").mkdir(parents=True)
    record = CheckpointRecord("4", batch=4, epoch=0, final=False, state_path="tinker://a", extra={"step": 4})
    (storage / "run" / "checkpoints.jsonl").write_text(json.dumps(record.to_dict()) + "\n")
    resume = f"Stopped. `tinker-flows resume run --storage {storage}` resumes after 4 steps"
    never = "; the same command would fail, because the name is in use and resume is 'never'."
    for if_exists, policy, same in (
        ("delete", "auto", "; the same command would delete the run, because if_exists is 'delete'."),
        ("delete", "never", "; the same command would delete the run, because if_exists is 'delete'."),
        ("ask", "auto", "; the same command asks what to do with the run, because if_exists is 'ask'."),
        ("resume", "never", never),
        ("resume", "auto", ", as the same command does."),
    ):
        with pytest.raises(ExplainedInterrupt):
            cli.run(sft, config.model_copy(update={"if_exists": if_exists, "resume": policy}))
        assert capsys.readouterr().err == f"{resume}{same}\n"
    for step, steps in ((0, "0 steps"), (1, "1 step")):
        record = CheckpointRecord("s", batch=step, epoch=0, final=False, state_path="tinker://a", extra={"step": step})
        (storage / "run" / "checkpoints.jsonl").write_text(json.dumps(record.to_dict()) + "\n")
        with pytest.raises(ExplainedInterrupt):
            cli.run(sft, config)
        assert f"resumes after {steps};" in capsys.readouterr().err


def test_flows_of_several_runs_reject_it(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(sft_fields(tmp_path, "base", "") | {"if_exists": "delete"}))
    sweep = validate_fields(SweepConfig, {"run_name": "s", "flow": "sft", "base": str(base), "metric": "test/nll"})
    with pytest.raises(ConfigError, match="a resumed sweep resumes its trials: remove if_exists"):
        make_plan(sweep)
    fields = rlhf_fields(tmp_path, "rlhf", "")
    fields["warm_start"] = {**fields.get("warm_start", {}), "if_exists": "delete"}
    with pytest.raises(ConfigError, match="a stage must not set if_exists"):
        validate_fields(RlhfConfig, fields)

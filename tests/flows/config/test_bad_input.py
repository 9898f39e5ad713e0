"""Errors of invalid input: one sentence with the cause and the fix, a non-zero exit, and no lost state."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_terms  # noqa: F401  # registers its terms
import pytest
import yaml
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from pydantic import BaseModel
from sft_config import sft_fields

from blocks.errors import ConfigError
from flows.compare import CompareConfig
from flows.config.loader import validate_fields
from flows.config.train import SftConfig
from flows.runs.cli import main, run
from flows.sft import sft

Fields = dict[str, Any]
FailingRun = Callable[..., str]
pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def error_of(
    tmp_path: Path,
    engine_url: str,
    mlflow_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> FailingRun:
    """Run the command line with changed fields; return its one-sentence error."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")

    def run(*overrides: str, **changes: object) -> str:
        config = tmp_path / "sft.yaml"
        config.write_text(
            yaml.safe_dump(sft_fields(tmp_path, "bad", mlflow_uri, engine_url) | {"num_steps": 2} | changes)
        )
        with pytest.raises(SystemExit) as exit_info:
            main("flows.sft:sft", "flows.config.train:SftConfig", None, argv=["--config", str(config), *overrides])
        message = str(exit_info.value)
        assert message.startswith("error: ")
        assert "\n" not in message
        assert "Traceback" not in capsys.readouterr().err
        return message

    return run


def regularizers(*entries: Fields) -> Fields:
    return {"regularizers": list(entries)}


def conversations(**common: Any) -> Fields:
    """Data of a tinker-cookbook builder, whose parameters the builder itself does not check."""
    params = {
        "file_path": "examples/data/sums.jsonl",
        "test_size": 8,
        "common_config": {"batch_size": 8, "max_length": 256, **common},
    }
    return {"builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder", "params": params}


def test_an_unquoted_off_of_yaml_is_off(tmp_path: Path) -> None:
    fields = sft_fields(tmp_path, "r", "") | {"guards": {"spike": False}, "prompt_logprobs_last_n": False}
    config = SftConfig.model_validate(fields | {"candidates": False, "objective": {"balance": False}})
    assert (config.guards.spike, config.prompt_logprobs_last_n, config.candidates) == ("off", "off", "off")
    assert config.objective.balance is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "gpt-17"}, r"no model 'gpt-17'; it offers tiny"),
        ({"learning_rat": 1}, r"the field 'learning_rat' is unknown; did you mean 'learning_rate'\?$"),
        ({"zzz": 1}, r"the field 'zzz' is unknown; the fields are .*learning_rate"),
        ({"budget": {"hour": 1}}, r"the field 'budget.hour' is unknown; did you mean 'hours'\?$"),
        ({"learning_rate": -1}, r"'learning_rate' is -1"),
        ({"run_name": "../x"}, r"'run_name' is '../x'"),
        ({"num_steps": 0}, r"'num_steps' is 0"),
        ({"keep_last": True}, r"'keep_last' is True, but it takes a number"),
        (
            {"objective": {"regularizers": [{"name": "confidence", "weight": {"target": {"at_most": 0.1}}}]}},
            r"weight' is .*, but use a number, or fields whose schedule is .*; a target is a field of the term",
        ),
        ({"budget": {"usd": True}}, r"'usd' is True, but it takes a number"),
        (
            {"keep_best": "test/nll"},
            r"'keep_best' .*it has the fields metric and mode: write keep_best.metric=test/nll on the command line",
        ),
        ({"objective": regularizers({"name": "topolgy"})}, r"'topolgy'.*topology"),
        (
            {"objective": regularizers({"name": "logic", "weight": -0.1})},
            r"'objective.regularizers.logic.weight.*' is -0.1, but .* 0",
        ),
        ({"objective": regularizers({"name": "logic", "weight": True})}, r"logic.weight' is True, but use a number"),
        ({"objective": regularizers({"name": "logic"}, {"name": "logic"})}, r"'logic'.*twice"),
        ({"objective": {"base_loss": "crossentropy"}}, r"'crossentropy' is unknown"),
        ({"objective": {"base_loss": {"name": "ppo"}}}, r"'base' needs sampling_logprobs.*use another base loss"),
        ({"objective": regularizers({"name": "test_raises"})}, r"'test_raises'.*colour"),
        ({"objective": regularizers({"name": "test_prepare_raises"})}, r"'test_prepare_raises'.*shape"),
        ({"objective": regularizers({"name": "test_nan"})}, r"'test_nan'.*nan"),
        ({"objective": regularizers({"name": "test_shape"})}, r"'test_shape'.*shape"),
        ({"objective": regularizers({"name": "test_no_gradient"})}, r"'test_no_gradient'.*scored.*monitor"),
        ({"data": {"builder": "examples.gsm8k:Gsm9k"}}, r"'examples.gsm8k:Gsm9k', which cannot be imported"),
        (
            {"data": conversations(renderer_name="qwen33")},
            r"Batch 0 of epoch 0 could not be read \(RendererError: Unknown renderer: qwen33",
        ),
        ({"data": conversations(batch_size=0)}, r"data\.params\.common_config\.batch_size is 0: set it to at least 1"),
        ({"learning_rate": "fast"}, r"'learning_rate' is 'fast', but use a number or auto"),
        ({"data": {"builder": "nowhere:Builder"}}, r"'nowhere:Builder', which cannot be imported"),
        ({"evaluators": [{"builder": "builtins:dict"}]}, r"returned a dict"),
        ({"keep_best": "test/nll"}, r"has the fields metric and mode: write keep_best\.metric=test/nll on the command"),
        ({"init_from": "init_from=a"}, r"'init_from' is 'init_from=a', but use the name of a run, RUN@STEP, RUN@best,"),
        ({"resume": "tinker://a:train:0/sampler_weights/final"}, r"can only be sampled from: use the path of a check"),
        ({"storage": "carrier-pigeon://x"}, r"'carrier-pigeon://x'"),
        (
            {"storage": "a\0b"},
            r"The run storage 'a\\x00b' is not a usable path \(embedded null byte\): set it to a dir",
        ),
        ({"storage": "~nouser/x"}, r"The run storage '~nouser/x' is not a usable path \(Could not determine home dir"),
        ({"storage": "/tmp/" + "a" * 5000}, r"The run storage '/tmp/a{195}' is not a usable path \(File name too long"),
        ({"storage": "/proc/none"}, r"Could not create /proc/none/bad"),
        ({"tracking": "nonsense://x"}, r"nonsense://x"),
        ({"base_url": "block:mine"}, r"no saved .* block named 'mine'"),
    ],
)
def test_invalid_fields(error_of: FailingRun, changes: Fields, expected: str) -> None:
    message = error_of(**changes)
    assert re.search(expected, message), message


def data(**params: object) -> Fields:
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": 4}
    return {"builder": "examples.gsm8k:Gsm8kBuilder", "params": {"common_config": common, **params}}


@pytest.mark.parametrize(
    ("config_type", "fields", "message"),
    [
        (CompareConfig, {"checkpoint": "a"}, "'run_name', 'path' and 'renderer_name' are missing: set them in the"),
        (
            SftConfig,
            {"run_name": "a", "model": "tiny"},
            "'data' is missing: set it in the config file or as field=value",
        ),
    ],
)
def test_all_missing_fields_are_named(config_type: type[BaseModel], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^The config is invalid: {message}"):
        validate_fields(config_type, fields)


def test_missing_data_file(error_of: FailingRun) -> None:
    assert "The data file nowhere.jsonl does not exist" in error_of(data=data(train_path="nowhere.jsonl"))
    assert "The data file ~nouser/x" in error_of(data=data(train_path="~nouser/x"))


def test_malformed_data_file(error_of: FailingRun, tmp_path: Path) -> None:
    truncated = tmp_path / "half.jsonl"
    truncated.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+')
    message = error_of(data=data(train_path=str(truncated)))
    assert f"line 2 of {truncated}" in message


def test_unreadable_row(error_of: FailingRun, tmp_path: Path) -> None:
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text('{"messages": [{"role": "user"}, {"role": "assistant"}]}\n' * 4)
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": 4}
    message = error_of(data={"builder": builder, "params": {"file_path": str(conversations), "common_config": common}})
    assert "Batch 0 of epoch 0 could not be read" in message


def test_too_few_rows_for_a_batch(error_of: FailingRun, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"question": "1+1?", "answer": "2"}\n')
    assert "no full batch" in error_of(data=data(train_path=str(one)))


def test_batch_without_a_trained_token(error_of: FailingRun) -> None:
    common = {"renderer_name": "qwen3_instruct", "max_length": 8, "batch_size": 4}
    assert "nothing to train (no token of non-zero weight" in error_of(data=data(common_config=common))


def test_unknown_override(error_of: FailingRun) -> None:
    assert "'temperature'" in error_of("temperature=1")
    assert "field=value" in error_of("learning_rate")
    assert "'sparsity', which is not in the list" in error_of("objective.regularizers.sparsity.weight=1")


def test_unreadable_config(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("run_name: [")
    for path, expected in ((tmp_path / "absent.yaml", "could not be read"), (broken, "is not valid YAML")):
        with pytest.raises(SystemExit, match=expected):
            main("flows.sft:sft", "flows.config.train:SftConfig", None, argv=["--config", str(path)])


def test_an_exit_inside_a_flow_is_an_error(tmp_path: Path) -> None:
    @flow(validate_parameters=False)
    def leaving(config: SftConfig) -> None:
        sys.exit()

    with pytest.raises(ConfigError, match=r"^Code that the config names called sys\.exit\(\)"):
        run(leaving, SftConfig.model_validate(sft_fields(tmp_path, "r", "")))


def test_failing_terms_are_skipped(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    fields = sft_fields(tmp_path, "skip", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 0}
    skipped = ("raises", "prepare_raises", "nan", "shape", "changes_its_inputs", "clash", "no_gradient")
    hanging = {"fn": "test_hangs_in_a_flow", "timeout_s": 0.5, "on_error": "skip"}
    fields["objective"] = regularizers(
        *({"name": name, "fn": f"test_{name}", "on_error": "skip"} for name in skipped),
        *({**hanging, "name": f"hangs_in_{place}", "execution": place} for place in ("thread", "process")),
        {"name": "last", "fn": "test_good_once", "on_error": "last"},
        {"name": "again", "fn": "test_good_at_second", "retries": 1, "params": {"calls": []}},
        {"name": "logic", "execution": "inline"},
    )
    result = sft(SftConfig.model_validate(fields))
    assert result.num_steps == 2
    expected = {f"term/{name}/skipped" for name in (*skipped, "hangs_in_thread", "hangs_in_process")}
    assert {key for key in result.metrics if key.endswith("/skipped")} == {*expected, "term/last/skipped"}
    assert not any(f"term/{name}/value" in result.metrics for name in skipped)
    assert "term/logic/value" in result.metrics
    assert "term/again/value" in result.metrics
    points = MlflowClient(mlflow_uri).get_metric_history
    for key, at_failure in (("own", 5.0), ("grad_norm", 0.0), ("weight", 1.0)):
        assert [point.value for point in points(result.mlflow_run_id, f"term/last/{key}")][1] == at_failure
    first, second = (point.value for point in points(result.mlflow_run_id, "term/last/value"))
    assert first == second

    alone = fields | {
        "run_name": "alone",
        "objective": regularizers({"name": "logic"}, {"name": "again", "fn": "confidence"}),
    }
    same = sft(SftConfig.model_validate(alone)).mlflow_run_id
    for key in ("train_mean_nll", "term/logic/value"):  # the failures change nothing in the first step
        assert points(same, key)[0].value == points(result.mlflow_run_id, key)[0].value


def num_flow_runs() -> int:
    with get_client(sync_client=True) as client:
        return client.count_flow_runs()


def test_reused_run_name_with_another_config(
    error_of: FailingRun, tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    fields = sft_fields(tmp_path, "bad", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 0}
    assert "no model" in error_of(model="tyni", eval_every=0)  # the name stays free: nothing is trained yet
    first = sft(SftConfig.model_validate(fields))
    checkpoints = (tmp_path / "runs" / "bad" / "checkpoints.jsonl").read_text()
    rate = fields["learning_rate"]
    expected = (
        f"was started with another learning_rate ({rate}, now 0.5): restore it, choose another run_name, or start"
    )
    before = num_flow_runs()
    assert expected in error_of(eval_every=0, learning_rate=0.5)
    assert num_flow_runs() == before, "the change is rejected before a flow run starts"
    assert "is in use" in error_of(eval_every=0, resume="never")
    assert (tmp_path / "runs" / "bad" / "checkpoints.jsonl").read_text() == checkpoints
    assert sft(SftConfig.model_validate(fields)).state_path == first.state_path

"""Whatever is wrong: one sentence that names it and the remedy, a non-zero exit, and nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_terms  # noqa: F401  # registers its terms
import pytest
import yaml
from mlflow import MlflowClient
from sft_config import sft_fields

from flows.command_line import main
from flows.sft import SftConfig, sft

Fields = dict[str, Any]
Refused = Callable[..., str]
pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def refused(
    tmp_path: Path,
    engine_url: str,
    mlflow_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Refused:
    """Run the command line with some fields changed; returns the one sentence it ends with."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")

    def run(*overrides: str, **changed: object) -> str:
        config = tmp_path / "sft.yaml"
        config.write_text(
            yaml.safe_dump(sft_fields(tmp_path, "bad", mlflow_uri, engine_url) | {"num_steps": 2} | changed)
        )
        with pytest.raises(SystemExit) as exit_info:
            main(sft, SftConfig, ["--config", str(config), *overrides])
        message = str(exit_info.value)
        assert message.startswith("error: ")
        assert "\n" not in message
        assert "Traceback" not in capsys.readouterr().err
        return message

    return run


def regularizers(*entries: Fields) -> Fields:
    return {"regularizers": list(entries)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"model": "gpt-17"}, r"no model 'gpt-17'; it offers tiny"),
        ({"learning_rat": 1}, r"no field 'learning_rat'; the fields are .*learning_rate"),
        ({"learning_rate": -1}, r"'learning_rate' is -1"),
        ({"run_name": "../x"}, r"'run_name' is '../x'"),
        ({"num_steps": 0}, r"'num_steps' is 0"),
        ({"objective": regularizers({"name": "topolgy"})}, r"'topolgy'.*topology"),
        (
            {"objective": regularizers({"name": "logic", "weight": -0.1})},
            r"'objective.regularizers.logic.weight.*' is -0.1, but .* 0",
        ),
        ({"objective": regularizers({"name": "logic"}, {"name": "logic"})}, r"'logic'.*twice"),
        ({"objective": {"base_loss": "crossentropy"}}, r"'crossentropy' is unknown"),
        ({"objective": {"base_loss": {"name": "ppo"}}}, r"'base' needs sampling_logprobs.*take another base loss"),
        ({"objective": regularizers({"name": "test_raises"})}, r"'test_raises'.*colour"),
        ({"objective": regularizers({"name": "test_prepare_raises"})}, r"'test_prepare_raises'.*shape"),
        ({"objective": regularizers({"name": "test_nan"})}, r"'test_nan'.*nan"),
        ({"objective": regularizers({"name": "test_shape"})}, r"'test_shape'.*shape"),
        ({"objective": regularizers({"name": "test_no_gradient"})}, r"'test_no_gradient'.*scored.*monitor"),
        ({"data": {"builder": "examples.gsm8k:Gsm9k"}}, r"'examples.gsm8k:Gsm9k', which cannot be imported"),
        ({"data": {"builder": "nowhere:Builder"}}, r"'nowhere:Builder', which cannot be imported"),
        ({"evaluators": [{"builder": "builtins:dict"}]}, r"made a dict where an evaluator"),
        ({"storage": "carrier-pigeon://x"}, r"'carrier-pigeon://x'"),
        ({"storage": "/proc/none"}, r"Could not make /proc/none/bad"),
        ({"tracking": "nonsense://x"}, r"nonsense://x"),
        ({"base_url": "block:mine"}, r"no saved .* block named 'mine'"),
    ],
)
def test_wrong_fields(refused: Refused, changed: Fields, expected: str) -> None:
    message = refused(**changed)
    assert re.search(expected, message), message


def data(**params: object) -> Fields:
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": 4}
    return {"builder": "examples.gsm8k:Gsm8kBuilder", "params": {"common_config": common, **params}}


def test_missing_data_file(refused: Refused) -> None:
    assert "The data file nowhere.jsonl does not exist" in refused(data=data(train_path="nowhere.jsonl"))


def test_malformed_data_file(refused: Refused, tmp_path: Path) -> None:
    half = tmp_path / "half.jsonl"
    half.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+')
    message = refused(data=data(train_path=str(half)))
    assert f"line 2 of {half}" in message


def test_row_that_cannot_be_read(refused: Refused, tmp_path: Path) -> None:
    talks = tmp_path / "talks.jsonl"
    talks.write_text('{"messages": [{"role": "user"}, {"role": "assistant"}]}\n' * 4)
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": 4}
    message = refused(data={"builder": builder, "params": {"file_path": str(talks), "common_config": common}})
    assert "Batch 0 of epoch 0 could not be read" in message


def test_too_few_rows_for_a_batch(refused: Refused, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"question": "1+1?", "answer": "2"}\n')
    assert "no whole batch" in refused(data=data(train_path=str(one)))


def test_batch_without_a_trained_token(refused: Refused) -> None:
    common = {"renderer_name": "qwen3_instruct", "max_length": 8, "batch_size": 4}
    assert "No token of a batch has a non-zero weight" in refused(data=data(common_config=common))


def test_unknown_override(refused: Refused) -> None:
    assert "'temperature'" in refused("temperature=1")
    assert "field=value" in refused("learning_rate")
    assert "no entry 'sparsity'" in refused("objective.regularizers.sparsity.weight=1")


def test_unreadable_config(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("run_name: [")
    for path, expected in ((tmp_path / "absent.yaml", "could not be read"), (broken, "is not YAML")):
        with pytest.raises(SystemExit, match=expected):
            main(sft, SftConfig, ["--config", str(path)])


def test_a_term_that_may_fail_costs_only_itself(
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
    gone = {f"term/{name}/skipped" for name in (*skipped, "hangs_in_thread", "hangs_in_process")}
    assert {key for key in result.metrics if key.endswith("/skipped")} == {*gone, "term/last/skipped"}
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
    for key in ("train_mean_nll", "term/logic/value"):  # of the first step: what failed there changed nothing
        assert points(same, key)[0].value == points(result.mlflow_run_id, key)[0].value


def test_another_config_under_the_same_name(refused: Refused, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = sft_fields(tmp_path, "bad", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 0}
    assert "no model" in refused(model="tyni", eval_every=0)  # mended under the same name, as nothing is trained yet
    first = sft(SftConfig.model_validate(fields))
    kept = (tmp_path / "runs" / "bad" / "checkpoints.jsonl").read_text()
    assert "was started with another learning_rate" in refused(eval_every=0, learning_rate=0.5)
    assert "is in use" in refused(eval_every=0, resume="never")
    assert (tmp_path / "runs" / "bad" / "checkpoints.jsonl").read_text() == kept
    assert sft(SftConfig.model_validate(fields)).state_path == first.state_path

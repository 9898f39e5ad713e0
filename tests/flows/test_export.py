"""Exports give the same log-probabilities in transformers and peft as the checkpoint on the service."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY
from peft import PeftModel
from prefect import flow
from pydantic import SecretStr
from safetensors.torch import load_file, save_file
from sft_config import sft_fields
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from blocks.errors import ConfigError, ExplainedInterrupt, ServiceError, StorageError
from blocks.service import TinkerService
from deployments.cli.weights import export as export_command
from flows.config.train import SftConfig
from flows.export import ExportConfig, ExportResult, export
from flows.runs import cli
from flows.runs.cli import run, silence_console_logs
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server")
TOKENS = torch.tensor([256, 97, 98, 32, 99, 100, 101, 10, 49, 50])


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory, mlflow_uri: str, engine_url: str) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", API_KEY)
        yield sft_fields(tmp_path_factory.mktemp("export"), "exported", mlflow_uri, engine_url)


@pytest.fixture(scope="module")
def trained(prefect_server: str, fields: dict[str, Any]) -> TrainResult:
    few = {"objective": {}, "num_steps": 3, "eval_every": 0, "checkpoint_every": 2, "learning_rate": 0.05}
    return sft(SftConfig.model_validate(fields | few))


def config(fields: dict[str, Any], output: Path, **changes: object) -> ExportConfig:
    places = {key: fields[key] for key in ("base_url", "storage")}
    return ExportConfig.model_validate({**places, "checkpoint": "exported@final", "output": str(output), **changes})


@pytest.fixture(scope="module")
def exported(trained: TrainResult, fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(config(fields, tmp_path_factory.mktemp("weights") / "out"))


def test_the_run_of_a_deployment_exports_with_the_key_of_a_block(
    trained: TrainResult, fields: dict[str, Any], tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may send the key of its environment to no other service."""
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setattr("blocks.default_service.is_restricted", lambda: True)
    TinkerService(base_url=engine_url, api_key=SecretStr(API_KEY)).save("exporter", overwrite=True)
    result = export(config(fields, tmp_path / "out", base_url="block:exporter", form="adapter"))
    assert result.path == trained.state_path
    assert "TINKER_API_KEY" not in os.environ


def of_service(engine_url: str, path: str) -> torch.Tensor:
    """Return the log-probability of each token of `TOKENS` after the first."""
    with tinker.ServiceClient(base_url=engine_url) as session:
        client = session.create_training_client_from_state(path).result()
        loss = {"target_tokens": TOKENS[1:].tolist(), "weights": [1.0] * (len(TOKENS) - 1)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1].tolist()), loss_fn_inputs=loss)
        return client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()


def of_model(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logprobs_TV = model(TOKENS[None, :-1]).logits[0].float().log_softmax(-1)
    return logprobs_TV.gather(1, TOKENS[1:, None])[:, 0]


def test_exports_give_the_logprobs_of_the_service(
    exported: ExportResult, trained: TrainResult, engine_url: str
) -> None:
    assert exported.path == trained.state_path
    expected = of_service(engine_url, trained.state_path)
    base = AutoModelForCausalLM.from_pretrained(exported.base_model)
    assert not torch.allclose(of_model(base), expected, atol=1e-2), "the adapter has to change something"
    merged = AutoModelForCausalLM.from_pretrained(exported.merged)
    torch.testing.assert_close(of_model(merged), expected, atol=1e-4, rtol=1e-4)
    adapted = PeftModel.from_pretrained(base, exported.adapter)
    torch.testing.assert_close(of_model(adapted), expected, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(exported.merged)
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"
    assert {path.name for path in Path(exported.adapter).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_export_by_step_and_by_path(
    exported: ExportResult, trained: TrainResult, fields: dict[str, Any], engine_url: str, tmp_path: Path
) -> None:
    at_two = export(config(fields, tmp_path / "two", checkpoint="exported@2", form="adapter"))
    assert at_two.merged == ""
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["adapter"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(at_two.base_model), at_two.adapter)
    torch.testing.assert_close(of_model(adapted), of_service(engine_url, at_two.path), atol=1e-4, rtol=1e-4)
    final = export(config(fields, tmp_path / "path", checkpoint=trained.state_path, model="tiny", form="adapter"))
    name = "adapter_model.safetensors"
    ours, theirs = (load_file(Path(result.adapter) / name) for result in (final, exported))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_merge_of_a_model_with_tied_embeddings(
    exported: ExportResult, trained: TrainResult, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The adapter of the output layer must not change the embedding, as in peft."""
    base = AutoModelForCausalLM.from_pretrained(exported.base_model)
    base.lm_head.weight = base.model.embed_tokens.weight
    base.config.tie_word_embeddings = True
    tied = tmp_path / "tied"
    base.save_pretrained(tied)
    AutoTokenizer.from_pretrained(exported.base_model).save_pretrained(tied)
    weights = load_file(tied / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    both = export(config(fields, tmp_path / "out", base_model=str(tied)))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tied), both.adapter)
    merged = AutoModelForCausalLM.from_pretrained(both.merged)
    torch.testing.assert_close(of_model(merged), of_model(adapted), atol=1e-4, rtol=1e-4)
    embedding = merged.get_input_embeddings().weight
    assert torch.equal(embedding, AutoModelForCausalLM.from_pretrained(tied).get_input_embeddings().weight)
    assert not torch.equal(embedding, merged.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpoint": "exported@1"}, r"the run 'exported' has no checkpoint at step 1; it has checkpoints at 2, 3"),
        ({"checkpoint": "exported@best"}, "has no best checkpoint, which needs keep_best"),
        ({"checkpoint": "nobody"}, "the run 'nobody' has no checkpoint in"),
        ({"checkpoint": "base"}, "`base`, which has no adapter to export"),
        ({"checkpoint": "tinker://gone/weights/x", "model": "tiny"}, r"could not send tinker://gone/weights/x \("),
        ({"checkpoint": "tinker://gone/weights/x"}, "The model of the weights is unknown"),
        ({"base_model": "/"}, "base model / is a directory without a config.json"),
        ({"base_model": "/nowhere"}, "base model '/nowhere' is not a directory and could not be downloaded"),
        ({"output": "~no-such-user/out"}, "output is '~no-such-user/out', which cannot be a path"),
        ({"output": "OUT"}, "adapter already exists: choose another output"),
        ({"output": __file__}, r"adapter cannot be created, because .*test_export.py is a file: choose another output"),
        ({"base_model": "/nowhere", "form": "merged"}, "base model '/nowhere' is not a directory"),
    ],
)
def test_invalid_exports(
    exported: ExportResult, fields: dict[str, Any], tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    chosen = changes.pop("output", "")
    output = Path(exported.adapter).parent if chosen == "OUT" else Path(chosen or tmp_path / "out")
    with pytest.raises((ConfigError, ServiceError, StorageError), match=expected):
        export(config(fields, output, **changes))
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_noticed_before_servers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    started: list[str] = []
    monkeypatch.setattr(cli, "start", lambda *arguments: started.append(arguments[0]))
    with pytest.raises(StorageError, match="out/adapter already exists: choose another output or remove it"):
        export_command("mine", adapter=str(tmp_path / "out"))
    assert not started
    export_command("mine", merged=str(tmp_path / "out"))
    assert started == ["flows.export:export"]


def test_a_stopped_export_starts_over(capsys: pytest.CaptureFixture[str]) -> None:
    @flow
    def stopped_export(config: ExportConfig) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ExplainedInterrupt):
        run(stopped_export, ExportConfig(checkpoint="base", output="out"))
    message = capsys.readouterr().err
    assert "the same command starts over" in message
    assert "checkpoint" not in message


def test_deprecations_within_the_cookbook_are_not_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_console_logs()
        for module in ("tinker_cookbook.weights._download", "my_package"):
            warnings.warn_explicit(f"from {module}", FutureWarning, "file.py", 1, module)
    assert [str(warning.message) for warning in shown] == ["from my_package"]

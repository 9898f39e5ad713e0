"""`tinker-flows which-method` and `tinker-flows models`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file

from deployments.command_line import main
from deployments.methods import METHODS
from deployments.which_method import RESOURCES, Resource, advise
from engine.models import resolve_model
from flows.config.loader import load_config, renderer_names
from flows.config.rlhf import RlhfConfig
from flows.config.train import TrainConfig
from flows.runs.prices import PRICES_DATE
from objectives.config.import_path import import_path

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.name)
def test_every_resource_leads_to_a_method_and_an_example(resource: Resource) -> None:
    advice = advise({resource.name: True})
    assert advice.method in METHODS
    _, _, method, _, path, *overrides = shlex.split(advice.command)
    config_type: Any = import_path(METHODS[method].config)
    config = load_config(config_type, ROOT / path, overrides)
    if isinstance(config, RlhfConfig):
        assert config.judge
        assert config.judge.params == {"model": "JUDGE"}


@pytest.mark.parametrize("name", ["reward", "preferences", "teacher"])
def test_second_command_fits_the_weights_of_the_first(name: str) -> None:
    advice = advise({name: True, "demonstrations": True})
    configs: list[TrainConfig] = []
    for command in (advice.before, f"{advice.command} {advice.start}"):
        _, _, method, _, path, *overrides = shlex.split(command)
        configs.append(load_config(cast(Any, import_path(METHODS[method].config)), ROOT / path, overrides))
    first, second = configs
    assert (second.init_from, second.model, second.lora_rank) == (first.run_name, first.model, first.lora_rank)
    assert renderer_names(second) == renderer_names(first), "the weights have learned this chat format"


def test_a_teacher_comes_before_a_reward_and_data_before_exploration() -> None:
    advice = advise({"reward": True, "teacher": True, "demonstrations": True})
    assert advice.method == "on_policy_distillation"
    assert not advice.collect
    assert "collect 50 to 100 examples" in advise({"reward": True}).collect
    assert advise({}).collect.startswith("Collect data first")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert not exit_info.value.code
    return capsys.readouterr().out


def test_demonstrations_come_before_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    advice = json.loads(printed(capsys, "which-method", "--demonstrations", "--reward", "--json"))
    assert (advice["method"], advice["before"]) == ("rl", "tinker-flows run sft --config examples/sft.yaml")
    assert "to learn from" in printed(capsys, "which-method", "--no-reward")


def test_models_of_a_service_have_context_lengths(
    capsys: pytest.CaptureFixture[str], engine_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    tiny, local = json.loads(printed(capsys, "models", "--base-url", engine_url, "--json"))
    assert (local["model"], local["type"]) == ("smollm2-135m", "local")
    assert (tiny["model"], tiny["context"], tiny["train"]) == ("tiny", 4096, 0.0)
    assert tiny["auto_rate"] == pytest.approx(0.0126, rel=0.01)
    monkeypatch.delenv("TINKER_API_KEY")
    rows = {row["model"]: row for row in json.loads(printed(capsys, "models", "--json"))}
    assert (rows["Qwen/Qwen3-8B"]["size"], rows["Qwen/Qwen3-8B"]["type"]) == ("8B", "chat, dense")
    assert rows["Qwen/Qwen3.6-35B-A3B"]["type"] == "chat, mixture, vision"
    assert rows["openai/gpt-oss-120b:peft:131072"]["context"] == 131072
    table = printed(capsys, "models")
    assert f"dollars per million tokens (hosted service: prices of {PRICES_DATE})" in table
    header = next(line for line in table.splitlines() if "prefill" in line)
    columns = ["model", "size", "type", "context", "prefill", "sample", "train", "auto rate", "renderer"]
    assert [column.strip() for column in header.strip("┃ ").split("┃")] == columns
    folder = Path(resolve_model("tiny", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    num_parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert (rows["tiny"]["context"], rows["tiny"]["size"]) == (
        config["max_position_embeddings"],
        f"{num_parameters // 1000}K",
    )
    assert (rows["smollm2-135m"]["context"], rows["smollm2-135m"]["train"]) == (8192, 0.0)

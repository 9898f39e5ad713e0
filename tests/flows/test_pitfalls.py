"""Settings that are known to go wrong are found, and those that are right are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tinker
from dpo_config import dpo_fields
from rl_config import rl_fields
from sft_config import sft_fields
from tinker_cookbook.checkpoint_utils import CheckpointRecord, add_renderer_name_to_user_metadata

from blocks.errors import ConfigError
from flows.config_file import validate_fields
from flows.dpo import DpoConfig
from flows.learning_rate import recommended_rate
from flows.pitfalls import pitfalls_of, pitfalls_of_checkpoint
from flows.rl import RlConfig
from flows.sft import SftConfig
from flows.train_config import TrainConfig

HOSTED = "Qwen/Qwen3.5-9B"


def keys(config: TrainConfig) -> set[str]:
    return {each.key for each in pitfalls_of(config)}


def sft(**changes: Any) -> SftConfig:
    return SftConfig.model_validate(sft_fields(Path("there"), "pitfalls", "") | changes)


def data(renderer: str, **params: Any) -> dict[str, Any]:
    return {"builder": "a:B", "params": {"common_config": {"renderer_name": renderer}, **params}}


def test_a_config_that_is_right_is_not_warned_of() -> None:
    assert keys(sft()) == set()
    assert keys(sft(model=HOSTED, learning_rate=4e-4, data=data("qwen3_5"))) == set()
    assert keys(RlConfig.model_validate(rl_fields(Path("there"), "fine", ""))) == set()
    assert keys(DpoConfig.model_validate(dpo_fields(Path("there"), "fine", ""))) == set()


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (sft(learning_rate=1e-3), "learning_rate", "by the published rule 0.013 for tiny"),
        (sft(model=HOSTED, learning_rate=5e-5, data=data("qwen3_5")), "learning_rate", "0.00047 for Qwen"),
        (sft(model=HOSTED, learning_rate=4e-4, data=data("llama3")), "renderer", "made with qwen3_5 or"),
        (sft(data=data("x", train_path="a.jsonl", test_path="./a.jsonl")), "evaluation", "is trained and evaluated on"),
    ],
)
def test_what_goes_wrong_is_said(config: SftConfig, key: str, said: str) -> None:
    (found,) = pitfalls_of(config)
    assert found.key == key
    assert said in found.text


def test_a_group_of_one_learns_nothing() -> None:
    fields = rl_fields(Path("there"), "alone", "")
    fields["environment"]["params"]["group_size"] = 1
    assert keys(RlConfig.model_validate(fields)) == {"group_of_one"}


def test_a_large_beta_learns_hardly_anything() -> None:
    fields = dpo_fields(Path("there"), "stiff", "")
    fields["objective"] = {"base_loss": {"name": "dpo", "params": {"beta": 2.0}}}
    assert keys(DpoConfig.model_validate(fields)) == {"beta"}


def test_a_fork_with_another_chat_format_is_told(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    service = tinker.ServiceClient(base_url=engine_url)
    metadata: dict[str, str] = {}
    add_renderer_name_to_user_metadata(metadata, "role_colon")
    client = service.create_lora_training_client("tiny", rank=1, user_metadata=metadata).result()
    path = client.save_state("parent").result().path
    start = CheckpointRecord(name="fork", batch=0, state_path=path)
    (found,) = pitfalls_of_checkpoint(service, start, sft(resume=path))
    assert "was trained with role_colon" in found.text
    assert not list(pitfalls_of_checkpoint(service, start, sft(resume=path, data=data("role_colon"))))
    assert not list(pitfalls_of_checkpoint(service, start, sft()))


def test_an_automatic_rate_is_the_published_one_and_kept_as_a_number(tmp_path: Path) -> None:
    assert sft(learning_rate="auto").learning_rate == pytest.approx(5e-4 * (2000 / 32) ** 0.781)
    assert sft(learning_rate="auto", model="Qwen/Qwen3-8B").learning_rate == pytest.approx(
        5e-4 * (2000 / 4096) ** 0.0775
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 1024}))
    assert recommended_rate(str(tmp_path)) == pytest.approx(5e-4 * (2000 / 1024) ** 0.0775)


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "acme/model"])
def test_a_family_without_a_rule_is_a_sentence(model: str) -> None:
    with pytest.raises(ConfigError, match=f"no rule for the learning rate of {model}"):
        validate_fields(SftConfig, sft_fields(Path("there"), "none", "") | {"learning_rate": "auto", "model": model})

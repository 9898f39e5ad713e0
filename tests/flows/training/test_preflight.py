"""Warnings about risky settings, and none about good ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from distill_config import distill_fields
from dpo_config import dpo_fields
from rl_config import rl_fields
from sft_config import sft_fields
from tinker_cookbook.checkpoint_utils import CheckpointRecord, add_renderer_name_to_user_metadata

from blocks.errors import ConfigError
from flows.config.distill import OnPolicyConfig
from flows.config.dpo import DpoConfig
from flows.config.learning_rate import recommended_rate
from flows.config.loader import validate_fields
from flows.config.rl import RlConfig
from flows.config.train import SftConfig, TrainConfig
from flows.training.preflight import (
    pitfalls_of,
    pitfalls_of_checkpoint,
    warning_of_split_rollouts,
)
from objectives.batch import Batch
from objectives.labels import MEMBER, PROMPT
from objectives.objective import Objective

HOSTED = "Qwen/Qwen3.5-9B"


def keys(config: TrainConfig) -> set[str]:
    return {pitfall.key for pitfall in pitfalls_of(config)}


def sft(**changes: Any) -> SftConfig:
    return SftConfig.model_validate(sft_fields(Path("there"), "pitfalls", "") | changes)


def data(renderer: str, **params: Any) -> dict[str, Any]:
    return {"builder": "a:B", "params": {"common_config": {"renderer_name": renderer}, **params}}


def test_good_configs_have_no_pitfalls() -> None:
    assert keys(sft()) == set()
    assert keys(sft(model=HOSTED, learning_rate=4e-4, data=data("qwen3_5"))) == set()
    assert keys(RlConfig.model_validate(rl_fields(Path("there"), "fine", ""))) == set()
    assert keys(DpoConfig.model_validate(dpo_fields(Path("there"), "fine", ""))) == set()


@pytest.mark.parametrize(
    ("config", "key", "message"),
    [
        (sft(learning_rate=1e-3), "learning_rate", "the published rule gives 0.013 for tiny"),
        (sft(model=HOSTED, learning_rate=5e-5, data=data("qwen3_5")), "learning_rate", "0.00047 for Qwen"),
        (sft(model=HOSTED, learning_rate=4e-4, data=data("llama3")), "renderer", "trained with qwen3_5 or"),
        (
            sft(data=data("x", train_path="a.jsonl", test_path="./a.jsonl")),
            "evaluation",
            "is used for training and evaluation",
        ),
    ],
)
def test_pitfalls(config: SftConfig, key: str, message: str) -> None:
    (pitfall,) = pitfalls_of(config)
    assert pitfall.key == key
    assert message in pitfall.text


def test_logprobs_of_samples_that_train() -> None:
    """Warn about untempered logprobs and about tokens that are never sampled, unless the user's completer samples."""

    def keys_of(rollout: dict[str, Any]) -> set[str]:
        return keys(RlConfig.model_validate(rl_fields(Path("there"), "hot", "") | {"rollout": rollout}))

    assert keys_of({"temperature": 0.3}) == set()
    assert keys_of({"temperature": 0.3, "logprobs": "service"}) == {"temperature"}
    assert keys_of({"logprobs": "service"}) == set()
    assert keys_of({"top_p": 0.9}) == {"support"}
    assert keys_of({"top_k": 5, "logprobs": "service"}) == {"temperature", "support"}
    assert keys_of({"top_k": 5, "logprobs": "service", "completer": {"builder": "a:B"}}) == set()
    datasets = [{"environment": {"builder": "a:b", "params": {"group_size": 4}}}]
    rollout = {"temperature": 0.3, "logprobs": "service"}
    distilled = distill_fields(Path("there"), "hot", "") | {"rollout": rollout, "datasets": datasets}
    assert "temperature" in keys(OnPolicyConfig.model_validate(distilled))


def test_rewards_of_a_hook_that_are_not_trained_on() -> None:
    fields = rl_fields(Path("there"), "hooked", "") | {"rollout": {"hook": {"builder": "a:b"}}}
    for rewards, expected in (
        ({}, set[str]()),
        ({"correct": {}}, {"hook"}),
        ({"correct": {}, "total": {}}, set[str]()),
        ({"correct": {}, "hook/even/reward": {}}, set[str]()),
    ):
        assert keys(RlConfig.model_validate(fields | {"rewards": rewards})) == expected


def test_a_clamp_of_a_total_reward_that_is_not_trained_on() -> None:
    rollouts = {"rollout": {"termination": {"zero_reward_on_limit": True}}}
    fields = rl_fields(Path("there"), "clamped", "") | rollouts
    for rewards, expected in (({}, set[str]()), ({"correct": {}}, {"termination"}), ({"total": {}}, set[str]())):
        assert keys(RlConfig.model_validate(fields | {"rewards": rewards})) == expected


def test_a_penalty_that_is_not_trained_on() -> None:
    fields = rl_fields(Path("there"), "long", "") | {"rollout": {"truncated": {"length": 5}}}
    for rewards, expected in (({}, set[str]()), ({"correct": {}}, {"overlong"}), ({"overlong/reward": {}}, set[str]())):
        assert keys(RlConfig.model_validate(fields | {"rewards": rewards})) == expected


def test_group_of_one() -> None:
    fields = rl_fields(Path("there"), "alone", "")
    fields["environment"]["params"]["group_size"] = 1
    assert keys(RlConfig.model_validate(fields)) == {"group_of_one"}


def test_rewards_of_groups_of_one_in_distillation() -> None:
    environment = {"builder": "a:b", "params": {"group_size": 1}}
    fields = distill_fields(Path("there"), "alone", "") | {"datasets": [{"environment": environment}]}
    fields["learning_rate"] = 1e-3
    before = keys(OnPolicyConfig.model_validate(fields))
    assert keys(OnPolicyConfig.model_validate(fields | {"train_on_rewards": True})) == before | {"group_of_one"}
    assert "group_of_one" not in before


def test_large_beta() -> None:
    fields = dpo_fields(Path("there"), "stiff", "")
    fields["objective"] = {"base_loss": {"name": "dpo", "params": {"beta": 2.0}}}
    assert keys(DpoConfig.model_validate(fields)) == {"beta"}


def test_terms_see_the_mismatched_completions_of_kto() -> None:
    fields = dpo_fields(Path("there"), "mine", "", "")
    fields["objective"] = {"base_loss": "kto", "regularizers": [{"name": "length", "weight": 1.0}]}
    assert keys(DpoConfig.model_validate(fields)) == {"kto"}
    fields["objective"]["regularizers"][0]["enabled"] = False
    assert keys(DpoConfig.model_validate(fields)) == set()


def test_fork_with_another_chat_format(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    service = tinker.ServiceClient(base_url=engine_url)
    metadata: dict[str, str] = {}
    add_renderer_name_to_user_metadata(metadata, "role_colon")
    client = service.create_lora_training_client("tiny", rank=1, user_metadata=metadata).result()
    path = client.save_state("parent").result().path
    start = CheckpointRecord(name="fork", batch=0, state_path=path)
    (pitfall,) = pitfalls_of_checkpoint(service, start, sft(resume=path))
    assert "was trained with role_colon" in pitfall.text
    assert not list(pitfalls_of_checkpoint(service, start, sft(resume=path, data=data("role_colon"))))
    (pitfall,) = pitfalls_of_checkpoint(service, start, sft(init_from=path))
    assert pitfall.text.startswith(f"renderer_name is qwen3_instruct, but init_from is {path!r}, which was trained")
    assert not list(pitfalls_of_checkpoint(service, start, sft()))


def test_alpha_without_effect() -> None:
    spec = {"name": "length", "weight": 1.0, "estimator": "score_function", "params": {"alpha": 10.0}}
    assert "alpha" in keys(sft(objective={"regularizers": [spec]}))
    for change in ({"estimator": "minimum_risk"}, {"enabled": False}):
        assert "alpha" not in keys(sft(objective={"regularizers": [spec | change]}))


def test_auto_learning_rate_is_the_published_rate(tmp_path: Path) -> None:
    assert sft(learning_rate="auto").learning_rate == pytest.approx(5e-4 * (2000 / 32) ** 0.781)
    assert sft(learning_rate="auto", model="Qwen/Qwen3-8B").learning_rate == pytest.approx(
        5e-4 * (2000 / 4096) ** 0.0775
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 1024}))
    assert recommended_rate(str(tmp_path)) == pytest.approx(5e-4 * (2000 / 1024) ** 0.0775)


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "acme/model"])
def test_auto_learning_rate_of_an_unknown_family_is_an_error(model: str) -> None:
    with pytest.raises(ConfigError, match=f"the rule does not cover the model {model}"):
        validate_fields(SftConfig, sft_fields(Path("there"), "none", "") | {"learning_rate": "auto", "model": model})


def test_kl_on_split_conversations_warns() -> None:
    """Two completions of one prompt, the first of which has two turns with a datum each."""
    fields = {"target_tokens_DT": torch.zeros(6).long(), "weights_DT": torch.ones(6)}
    labels = {PROMPT: torch.tensor([0, 0, 0]), MEMBER: torch.tensor([0, 0, 1])}
    split = Batch(**fields, offsets_D=torch.tensor([0, 2, 4, 6]), labels_D=labels)
    exact = Objective("ppo", [{"name": "kl", "fn": "kl"}])
    assert "The 2 conversations of the first batch are split into 3 datums" in warning_of_split_rollouts(exact, split)
    assert not warning_of_split_rollouts(Objective("ppo", [{"name": "kl_unweighted"}]), split)
    whole = replace(split, labels_D=labels | {MEMBER: torch.tensor([0, 1, 2])})
    assert not warning_of_split_rollouts(exact, whole)
    assert not warning_of_split_rollouts(exact, replace(split, labels_D={}))

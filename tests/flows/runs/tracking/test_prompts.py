"""Renderers and system prompts in the prompt registry of a real tracking store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow_store import new_store
from prefect.logging import disable_run_logger
from sft_config import sft_fields

from engine.tiny import byte_tokenizer
from flows.config.distill import PromptConfig
from flows.config.train import SftConfig
from flows.runs.tracking.prompts import register_prompts
from flows.sft import sft
from tasks.training.tracking.metrics import MetricsLog


@pytest.mark.usefixtures("api_key", "prefect_server")
def test_run_registers_its_renderer_once(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    client = MlflowClient(mlflow_uri)
    fields = sft_fields(tmp_path, "first", mlflow_uri, engine_url)
    fields |= {"objective": {}, "num_steps": 1, "eval_every": 0, "register_prompts": True}
    for run_name in ("first", "second"):
        result = sft(SftConfig.model_validate(fields | {"run_name": run_name}))
        linked = client.get_run(result.mlflow_run_id).data.tags["mlflow.linkedPrompts"]
        assert '"name": "renderer-qwen3_instruct", "version": "1"' in linked
    (prompt,) = [prompt for prompt in client.search_prompts() if prompt.name == "renderer-qwen3_instruct"]
    template = client.load_prompt(f"prompts:/{prompt.name}/1")
    assert template is not None
    # The chat format of Qwen: https://huggingface.co/Qwen/Qwen3-8B/blob/main/tokenizer_config.json
    assert template.template == "<|im_start|>user\n{{prompt}}<|im_end|>\n<|im_start|>assistant\n"


def test_setting_without_effect_and_unknown_renderer_warn(tmp_path: Path) -> None:
    client = MlflowClient(new_store(tmp_path))
    log = MetricsLog(client, client.create_run("0").info.run_id)
    fields = sft_fields(tmp_path, "run", "", "")
    fields["data"]["params"]["common_config"]["renderer_name"] = "of-my-builder"
    with disable_run_logger():
        register_prompts(log, SftConfig.model_validate(fields), byte_tokenizer())
    log.flush()
    tags = client.get_run(log.run_id).data.tags
    assert tags["tinker_flows.warning.prompts.of-my-builder"].startswith(
        "The renderer of-my-builder was not registered"
    )
    assert tags["tinker_flows.warning.prompts"].startswith("register_prompts has no effect")
    assert "mlflow.linkedPrompts" not in tags


def test_changed_system_prompt_is_a_new_version(tmp_path: Path) -> None:
    client = MlflowClient(new_store(tmp_path))
    log = MetricsLog(client, client.create_run("0").info.run_id)
    questions = {"path": "questions.jsonl"}

    def register(prompt: str) -> Any:
        fields = {"run_name": "run", "model": "tiny", "prompt": prompt, "questions": questions, "experiment": "a team"}
        register_prompts(log, PromptConfig.model_validate(fields), byte_tokenizer())
        loaded = client.load_prompt("a-team-prompt", cache_ttl_seconds=0)
        assert loaded is not None
        return loaded.version, loaded.template

    assert register("You are a clerk.") == (1, "You are a clerk.")
    assert register("You are a clerk.") == (1, "You are a clerk.")
    assert register("You are a poet.") == (2, "You are a poet.")
    assert register("You are a clerk.") == (2, "You are a poet.")  # both texts are versions already
    log.flush()
    linked = client.get_run(log.run_id).data.tags["mlflow.linkedPrompts"]
    assert linked == '[{"name": "a-team-prompt", "version": "1"}]'

"""First batch of each method, printed when a run starts and stored with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from distill_config import distill_fields, environment, questions
from dpo_config import dpo_fields
from engine_process import API_KEY
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from rl_config import rl_fields
from sft_config import sft_fields

from flows.config.distill import OffPolicyConfig, OnPolicyConfig, PromptConfig, SelfConfig
from flows.config.dpo import DpoConfig
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.distill import off_policy_distillation, on_policy_distillation, prompt_distillation, self_distillation
from flows.dpo import dpo
from flows.rl import rl
from flows.sft import sft


def datasets(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    teacher = {"environment": environment(folder), "teacher": {"checkpoint": "base"}}
    return distill_fields(folder, run_name, tracking, base_url) | {"datasets": [teacher]}


def prompted(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    fields = {"questions": questions(folder), "prompt": "Say what the user asks for."}
    return distill_fields(folder, run_name, tracking, base_url) | fields


def demonstrated(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    fields = {"questions": questions(folder), "teacher_prompt": "{question} Think first."}
    return distill_fields(folder, run_name, tracking, base_url) | fields


class Method(NamedTuple):
    flow: Callable[[Any], Any]
    config_type: type[Any]
    fields_of: Callable[[Path, str, str, str], dict[str, Any]]
    titles: list[str]


METHODS = [
    Method(sft, SftConfig, sft_fields, ["example 0"]),
    Method(dpo, DpoConfig, dpo_fields, ["chosen", "rejected"]),
    Method(rl, RlConfig, rl_fields, ["prompt 0, rollout"]),
    Method(on_policy_distillation, OnPolicyConfig, datasets, ["prompt 0, rollout 0"]),
    Method(off_policy_distillation, OffPolicyConfig, datasets, ["example 0"]),
    Method(self_distillation, SelfConfig, demonstrated, ["prompt 0, rollout 0"]),
    Method(prompt_distillation, PromptConfig, prompted, ["example 0"]),
]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "method",
    # The other kinds of distillation open their sources as these two do.
    [
        pytest.param(
            method,
            marks=pytest.mark.slow if method.config_type in (SelfConfig, PromptConfig) else (),
            id=method.config_type.__name__,
        )
        for method in METHODS
    ],
)
def test_every_method_shows_its_first_batch_once(
    tmp_path: Path,
    mlflow_uri: str,
    engine_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: Method,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    config = method.config_type.model_validate(
        method.fields_of(tmp_path, "shown", mlflow_uri, engine_url) | {"num_steps": 1}
    )
    result = method.flow(config)
    lines = capsys.readouterr().err.splitlines()
    assert any(re.match(r"shown: \w+ of tiny on \S+, 1 step, learning rate ", line) for line in lines)
    printed = [line for line in lines if line.startswith("First batch of shown: ")]
    assert len(printed) >= len(method.titles)
    for line, title in zip(printed, method.titles, strict=False):
        assert title in line
        weights = "loss weights from|each with the loss weight|all loss weights are 0"
        assert re.search(rf"\d+ of \d+ tokens trained, ({weights})", line)
    assert not any("\x1b" in line for line in printed)

    page = (Path(result.directory) / "first_batch.html").read_text()
    stored = MlflowClient(mlflow_uri).download_artifacts(result.mlflow_run_id, "first_batch.html", str(tmp_path))
    assert Path(stored).read_text() == page
    assert page.count("<h2>") >= len(printed)
    with get_client(sync_client=True) as client:
        of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[result.flow_run_id]))
        artifacts = {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=of_run)}
    assert f"{result.directory}/first_batch.html" in str(artifacts["first-batch-shown"].data)

    method.flow(config)
    assert "First batch" not in capsys.readouterr().err


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "objective",
    [{}, {"regularizers": [{"name": "confidence", "weight": 0.1}], "watch": {"effect_every": 2}}],
    ids=["cross_entropy", "term_with_effects"],
)
def test_plan_counts_the_tokens_of_all_batches(
    tmp_path: Path,
    mlflow_uri: str,
    engine_url: str,
    objective: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The batches differ in length, and the plan has the tokens that the run counts."""
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    fields = sft_fields(tmp_path, "planned", mlflow_uri, engine_url) | {"objective": objective}
    result = sft(SftConfig.model_validate(fields | {"num_steps": 3, "eval_every": 2}))
    planned = re.search(r"about ([\d,]+) tokens in passes, \$0; (?:about|time)", capsys.readouterr().err)
    assert planned
    assert int(planned[1].replace(",", "")) == result.metrics["cost/num_train_tokens"]


def test_plan_names_the_pace_of_an_earlier_run(
    tmp_path: Path,
    mlflow_uri: str,
    engine_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    fields = sft_fields(tmp_path, "earlier", mlflow_uri, engine_url) | {"experiment": tmp_path.name, "objective": {}}
    fields |= {"num_steps": 2, "eval_every": 0}
    sft(SftConfig.model_validate(fields))
    assert re.search(r"^earlier: .*; time unknown$", capsys.readouterr().err, re.MULTILINE)
    sft(SftConfig.model_validate(fields | {"run_name": "later"}))
    assert re.search(
        r"^later: .*; about \d+ s at the pace of earlier$",
        capsys.readouterr().err,
        re.MULTILINE,
    )

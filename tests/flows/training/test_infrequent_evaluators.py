"""Evaluators with a period of their own, at the steps of tinker-cookbook's loop and with its values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
from distill_config import distill_fields, environment
from dpo_config import dpo_fields
from engine_process import API_KEY
from mlflow import MlflowClient
from rl_config import rl_fields
from sft_config import sft_fields
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from blocks.errors import ConfigError
from examples.gsm8k import Gsm8kBuilder
from flows.config.distill import OnPolicyConfig
from flows.config.dpo import DpoConfig
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.distill import on_policy_distillation
from flows.dpo import dpo
from flows.estimates.supervised import estimate
from flows.rl import rl
from flows.sft import sft

ROWS = Path(__file__).parents[3] / "examples" / "data" / "gsm8k_train.jsonl"
NUM_STEPS = 8
OFTEN = [0, 2, 4, 6]
RARELY = [0, 3, 6]


class FixedTextNll(TrainingClientEvaluator):
    """Negative log-likelihood of a fixed text, which shows the weights that an evaluation measures."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        tokens = list(range(5, 21))
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # pyright: ignore
        output = await training_client.forward([datum], "cross_entropy")
        return {self.name: -sum(output.loss_fn_outputs[0]["logprobs"].data)}


class Constant(SamplingClientEvaluator):
    """Constant metric of weights that are saved for sampling."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        return {self.name: 1.0}


def entry(kind: str, name: str) -> dict[str, object]:
    return {"builder": f"{__name__}:{kind}", "params": {"name": name}}


EVALUATORS = {
    "num_steps": NUM_STEPS,
    "eval_every": 2,
    "infrequent_eval_every": 3,
    "evaluators": [entry("FixedTextNll", "often")],
    "infrequent_evaluators": [entry("FixedTextNll", "rarely"), entry("Constant", "sampled")],
}


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)


def on_policy_fields(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    datasets = [{"environment": environment(folder), "teacher": {"checkpoint": "base"}}]
    return distill_fields(folder, run_name, tracking, base_url) | {"datasets": datasets}


def values(mlflow_uri: str, run_id: str, name: str) -> dict[int, float]:
    points = MlflowClient(mlflow_uri).get_metric_history(run_id, name)
    assert len({point.step for point in points}) == len(points), "a step has two values"
    return {point.step: point.value for point in points}


def small_data(tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(ROWS.read_text().splitlines()[: 4 * 3]))
    common = {"renderer_name": "qwen3_instruct", "max_length": 768, "batch_size": 4}
    return {"train_path": str(rows), "common_config": common}


def initial_weights() -> tuple[str, str]:
    """Return the path of new weights, from which both loops start, and the name of the model's tokenizer."""
    with tinker.ServiceClient() as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
        return trainer.save_state("start").result().path, str(trainer.get_info().model_data.tokenizer_id)


def cookbook_metrics(directory: Path, params: dict[str, Any], start: str, name: str) -> list[dict[str, Any]]:
    """Run tinker-cookbook's supervised loop; return the lines of its metrics.jsonl."""
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=name, **params["common_config"])
    config = supervised.Config(
        log_path=str(directory), model_name=name, recipe_name="test", learning_rate=1e-2, lora_rank=4, num_epochs=4,
        dataset_builder=Gsm8kBuilder(common_config=common, train_path=params["train_path"]),
        load_checkpoint_path=start, max_steps=NUM_STEPS, save_every=0, eval_every=2, infrequent_eval_every=3,
        evaluator_builders=[lambda: FixedTextNll("often")],
        infrequent_evaluator_builders=[lambda: FixedTextNll("rarely"), lambda: Constant("sampled")],
    )  # fmt: skip
    asyncio.run(supervised.main(config))
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("prefect_server")
def test_steps_and_values_are_those_of_tinker_cookbook(tmp_path: Path, mlflow_uri: str, engine_url: str) -> None:
    """The run evaluates its final weights too, which tinker-cookbook does not."""
    params = small_data(tmp_path)
    start, tokenizer = initial_weights()
    lines = cookbook_metrics(tmp_path / "cookbook", params, start, tokenizer)
    data = {"builder": "examples.gsm8k:Gsm8kBuilder", "params": params}
    fields = sft_fields(tmp_path, "rare", mlflow_uri, engine_url) | EVALUATORS
    result = sft(
        SftConfig.model_validate(fields | {"data": data, "num_epochs": 4, "objective": {}, "init_from": start})
    )
    for name, steps in {"often": OFTEN, "rarely": RARELY, "sampled": RARELY}.items():
        theirs = {line["step"]: line[name] for line in lines if name in line}
        assert list(theirs) == steps
        ours = values(mlflow_uri, result.mlflow_run_id, name)
        assert {step: value for step, value in ours.items() if step < NUM_STEPS} == pytest.approx(theirs, abs=1e-4)
        assert max(ours) == NUM_STEPS
    assert values(mlflow_uri, result.mlflow_run_id, "often")[6] == values(mlflow_uri, result.mlflow_run_id, "rarely")[6]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("flow", "config_type", "fields_of"),
    [
        (dpo, DpoConfig, dpo_fields),
        (rl, RlConfig, rl_fields),
        (on_policy_distillation, OnPolicyConfig, on_policy_fields),
    ],
)
def test_every_method_evaluates_at_the_same_steps(
    tmp_path: Path,
    mlflow_uri: str,
    engine_url: str,
    flow: Callable[[Any], Any],
    config_type: type[Any],
    fields_of: Callable[[Path, str, str, str], dict[str, Any]],
) -> None:
    fields = fields_of(tmp_path, "rare", mlflow_uri, engine_url) | EVALUATORS
    fields |= {"num_steps": 4, "num_epochs": 9, "infrequent_eval_every": 3}
    result = flow(config_type.model_validate(fields))
    assert list(values(mlflow_uri, result.mlflow_run_id, "often")) == [0, 2, 4]
    assert list(values(mlflow_uri, result.mlflow_run_id, "rarely")) == [0, 3, 4]


@pytest.mark.usefixtures("prefect_server")
def test_resumed_run_evaluates_each_step_once(tmp_path: Path, mlflow_uri: str, engine_url: str) -> None:
    fields = sft_fields(tmp_path, "rare", mlflow_uri, engine_url) | EVALUATORS | {"objective": {}}
    first = sft(SftConfig.model_validate(fields))
    records = tmp_path / "runs" / "rare" / "checkpoints.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:1]))  # as if killed after step 2
    changed = fields | {"infrequent_eval_every": 4, "infrequent_evaluators": [entry("FixedTextNll", "late")]}
    again = sft(SftConfig.model_validate(changed))
    assert (again.mlflow_run_id, again.resumed_from) == (first.mlflow_run_id, 2)
    assert list(values(mlflow_uri, first.mlflow_run_id, "rarely")) == [*RARELY, NUM_STEPS]
    # MLflow keeps the first values of a step, metrics.jsonl those of the run that led to the final weights.
    lines = [json.loads(line) for line in (tmp_path / "runs" / "rare" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert [line["step"] for line in lines if "rarely" in line] == [0]
    assert [line["step"] for line in lines if "late" in line] == [4, NUM_STEPS]
    losses = values(mlflow_uri, first.mlflow_run_id, "loss/total")
    assert {line["step"]: line["loss/total"] for line in lines[:-1]} == losses


@pytest.mark.usefixtures("prefect_server")
def test_promote_if_may_name_an_infrequent_metric(tmp_path: Path, mlflow_uri: str, engine_url: str) -> None:
    fields = sft_fields(tmp_path, "rare", mlflow_uri, engine_url) | EVALUATORS
    fields |= {"num_steps": 4, "objective": {}, "register_as": "rare", "promote_if": "rarely < baseline"}
    assert sft(SftConfig.model_validate(fields)).not_promoted == ""
    with pytest.raises(ConfigError, match="promote_if requires rarely, which no evaluation measures"):
        sft(SftConfig.model_validate(fields | {"run_name": "never", "infrequent_eval_every": 0}))


def test_estimate_counts_held_out_data_at_frequent_evaluations_only(
    tmp_path: Path, mlflow_uri: str, engine_url: str
) -> None:
    fields = sft_fields(tmp_path, "rare", mlflow_uri, engine_url)
    few = fields | {"eval_every": 4, "num_steps": NUM_STEPS}
    often = estimate(SftConfig.model_validate(few))
    rarely = estimate(SftConfig.model_validate(few | {**EVALUATORS, "eval_every": 4}))
    assert often.num_evaluations == len([0, 4, 8])
    assert {name.partition(" ")[2] for name in rarely.excluded} == {
        "(evaluators.0)",
        "(infrequent_evaluators.0)",
        "(infrequent_evaluators.1)",
    }
    # An earlier run of the same model may give a pace, with which further evaluations take longer.
    assert replace(rarely, excluded=(), hours=None) == replace(often, hours=None)

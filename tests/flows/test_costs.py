"""Tokens that a run counts and an estimate predicts, compared with those that the engine counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tinker
from distill_config import distill_fields, environment
from engine_process import engine_tokens
from mlflow import MlflowClient
from rl_config import rl_fields
from rlhf_config import rlhf_fields
from sft_config import sft_fields

from flows.config.distill import OnPolicyConfig
from flows.config.rl import RlConfig
from flows.config.rlhf import RlhfConfig
from flows.distill import on_policy_distillation
from flows.estimate_rollouts import SamplingMethod, estimate_rollouts
from flows.evaluate import EvaluateConfig, evaluate
from flows.rl import rl
from flows.runs.result import TrainResult

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")

COUNTS = ("num_prefill_tokens", "num_sample_tokens", "num_cached_tokens")


def config_of(method: str, folder: Path, mlflow_uri: str, url: str, **changes: Any) -> SamplingMethod:
    """Return a run that also pays for a reference or a teacher, and for evaluations."""
    prices = folder / "prices.json"
    row = {"tinker_id": "tiny", "prefill": "$4,000", "sample": "$900", "train": "$70", "cached_prefill": "$1,000"}
    prices.write_text(json.dumps([row]))
    common = {"num_steps": 2, "eval_every": 2, "prompt_logprobs_last_n": "off", "budget": {"prices": str(prices)}}
    common |= {"experiment": folder.name}
    if method == "rl":
        fields = rl_fields(folder, "rl-cost", mlflow_uri, url) | {"advantage": {"kl_coefficient": 0.1}}
        return RlConfig.model_validate(fields | common | {"compute_post_kl": True} | changes)
    fields = distill_fields(folder, "distill-cost", mlflow_uri, url)
    data = [{"environment": environment(folder, teacher_prompt="Say nothing but letters.", group_size=2)}]
    return OnPolicyConfig.model_validate(fields | {"datasets": data} | common | changes)


def run(config: SamplingMethod) -> TrainResult:
    return rl(config) if isinstance(config, RlConfig) else on_policy_distillation(config)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("method", ["rl", "on_policy"])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_costs(method: str, max_tokens: int, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    config = config_of(method, tmp_path, mlflow_uri, engine_url, rollout={"max_tokens": max_tokens})
    expected = estimate_rollouts(config)
    assert expected.like == ""
    before = engine_tokens(engine_url)
    metrics = run(config).metrics
    after = engine_tokens(engine_url)
    counted = {use: after[use] - before.get(use, 0.0) for use in after}

    costs = {name: metrics[f"cost/{name}"] for name in (*COUNTS, "num_train_tokens", "usd")}
    assert costs["num_train_tokens"] == counted["trained"] + counted["forwarded"]
    assert costs["num_sample_tokens"] == counted["sampled"]
    # The engine reads the common prompt of several samples once; the others are cache hits.
    assert costs["num_prefill_tokens"] - costs["num_cached_tokens"] == counted["prompt"]
    usd = counted["prompt"] * 4000 + costs["num_cached_tokens"] * 1000
    usd += counted["sampled"] * 900 + costs["num_train_tokens"] * 70
    assert costs["usd"] == pytest.approx(usd / 1e6)

    low, high = expected.low, expected.high
    assert low.num_train_tokens <= costs["num_train_tokens"] <= high.num_train_tokens
    assert low.usd is not None
    assert high.usd is not None
    assert low.usd <= costs["usd"] <= high.usd
    for name in COUNTS:
        assert getattr(low.sampled, name) <= costs[name] <= getattr(high.sampled, name)
    if max_tokens == 1:
        assert low.sampled == high.sampled

    # The next run of this config has the cost of the first.
    again = estimate_rollouts(config.model_copy(update={"run_name": "next", "seed": 1, "num_steps": 4}))
    assert again.like == config.run_name
    assert again.low == again.high
    assert again.low.num_train_tokens == 2 * costs["num_train_tokens"]
    assert again.low.usd == pytest.approx(2 * costs["usd"])
    # With other prices, the tokens of the first have these prices.
    free = tmp_path / "free.json"
    free.write_text(json.dumps([{"tinker_id": "tiny", "prefill": "$0", "sample": "$0", "train": "$0"}]))
    repriced = config.model_copy(update={"budget": config.budget.model_copy(update={"prices": str(free)})})
    assert estimate_rollouts(repriced).like == config.run_name
    assert estimate_rollouts(repriced).low.usd == 0
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_tokens": max_tokens + 1})})
    assert estimate_rollouts(other).like == ""


@pytest.mark.parametrize("kind", ["reward model", "judge"])
def test_costs_of_reward_models_and_judges(kind: str, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = rlhf_fields(tmp_path, "judged", mlflow_uri, engine_url) | {"warm_start": {}}
    path = ""
    if kind == "judge":
        del fields["reward"]
        params = {"model": "tiny", "max_tokens": 5}
        fields["judge"] = {"builder": "tinker_flows:PromptedJudgeBuilder", "params": params}
    else:
        session = tinker.ServiceClient(base_url=engine_url)
        path = session.create_lora_training_client("tiny", rank=4).result().save_state("reward").result().path
    config = RlhfConfig.model_validate(fields).policy_stage("", path)
    config = config.model_copy(update={"prompt_logprobs_last_n": "off"})
    expected = estimate_rollouts(config)
    before = engine_tokens(engine_url)
    metrics = rl(config).metrics  # pyright: ignore[reportArgumentType]
    after = engine_tokens(engine_url)
    counted = {use: after[use] - before.get(use, 0.0) for use in after}
    assert metrics["cost/num_sample_tokens"] == counted["sampled"]
    assert metrics["cost/num_prefill_tokens"] - metrics["cost/num_cached_tokens"] == counted["prompt"]
    if kind == "reward model":
        low, high = expected.low.sampled, expected.high.sampled
        assert low.num_sample_tokens <= metrics["cost/num_sample_tokens"] <= high.num_sample_tokens
        # No upper bound: bytes of the untrained model that are no text become three tokens of the reward model each.
        assert low.num_prefill_tokens <= metrics["cost/num_prefill_tokens"]


def test_costs_of_an_oversampled_run(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Cost and estimate contain the cancelled groups as far as their tokens are known."""
    rollout = {"max_tokens": 6, "oversampling_factor": 1.5}
    config = config_of("rl", tmp_path, mlflow_uri, engine_url, rollout=rollout, eval_every=0)
    expected = estimate_rollouts(config)
    before = engine_tokens(engine_url)
    result = run(config)
    after = engine_tokens(engine_url)
    history = MlflowClient(mlflow_uri).get_metric_history
    for key in ("uncounted_tokens_max", "cancelled_groups"):
        points = history(result.mlflow_run_id, f"oversampling/{key}")
        assert len(points) == 2
    uncounted = sum(point.value for point in history(result.mlflow_run_id, "oversampling/uncounted_tokens_max"))
    assert [p.value for p in history(result.mlflow_run_id, "oversampling/cancelled_groups")] == [1.0, 1.0]
    num_sampled, num_prefill = (result.metrics[f"cost/num_{use}_tokens"] for use in ("sample", "prefill"))
    counted = {use: after[use] - before.get(use, 0.0) for use in after}
    assert num_sampled <= counted["sampled"] <= num_sampled + uncounted
    assert counted["prompt"] <= num_prefill
    assert expected.low.sampled.num_sample_tokens <= num_sampled <= expected.high.sampled.num_sample_tokens
    assert expected.low.sampled.num_prefill_tokens <= num_prefill <= expected.high.sampled.num_prefill_tokens
    assert expected.low.num_train_tokens <= result.metrics["cost/num_train_tokens"] <= expected.high.num_train_tokens
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert "oversampling/uncounted_tokens_max" in tags["tinker_flows.warning.pitfall.oversampling"]


def test_evaluation_costs(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = sft_fields(tmp_path, "measured", mlflow_uri, engine_url)
    data = Path(__file__).parents[2] / "examples" / "data" / "gsm8k_test.jsonl"
    sampling = {"max_tokens": 4, "num_samples": 2}
    params = {"path": str(data), "limit": 2, "renderer_name": "qwen3_instruct", "sampling": sampling}
    config = {name: fields[name] for name in ("run_name", "model", "base_url", "storage", "tracking", "data")}
    config |= {"checkpoint": "base", "evaluators": [{"builder": "tinker_flows:ExactMatch", "params": params}]}
    before = engine_tokens(engine_url)
    result = evaluate(EvaluateConfig.model_validate(config))
    after = engine_tokens(engine_url)
    counted = {use: after[use] - before.get(use, 0.0) for use in after}
    cost = result.cost
    assert cost["cost/num_train_tokens"] == counted["forwarded"] > 0
    assert cost["cost/num_sample_tokens"] == counted["sampled"] > 0
    assert cost["cost/num_prefill_tokens"] - cost["cost/num_cached_tokens"] == counted["prompt"]
    assert cost["cost/usd"] == 0.0  # a local engine is free

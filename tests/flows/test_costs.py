"""Tokens that a run counts and an estimate predicts, compared with those that the engine counts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
from distill_config import distill_fields, environment
from engine_process import engine_tokens
from metric_history import curve
from mlflow import MlflowClient
from rl_config import rl_fields
from rlhf_config import rlhf_fields
from sft_config import sft_fields
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator

from blocks.errors import ConfigError
from deployments.estimate import show_estimate
from flows.config.distill import OffPolicyConfig, OnPolicyConfig
from flows.config.rl import RlConfig
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.distill import off_policy_distillation, on_policy_distillation
from flows.estimates.costs import CostEstimate, TokenCosts
from flows.estimates.evaluation import estimate_evaluation
from flows.estimates.rlhf import estimate_rlhf
from flows.estimates.rollouts import SamplingMethod, estimate_rollouts
from flows.estimates.supervised import Estimate, estimate
from flows.estimates.teacher_data import estimate_teacher_data
from flows.evaluate import EvaluateConfig, evaluate
from flows.rl import rl
from flows.rlhf import rlhf, within_budget
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")

COUNTS = ("num_prefill_tokens", "num_sample_tokens", "num_cached_tokens")


def config_of(method: str, folder: Path, mlflow_uri: str, url: str, **changes: Any) -> SamplingMethod:
    """Return a run that also pays for a reference or a teacher, and for evaluations."""
    prices = folder / "prices.json"
    row = {"tinker_id": "tiny", "prefill": "$4,000", "sample": "$900", "train": "$70", "cached_prefill": "$1,000"}
    prices.write_text(json.dumps([row]))
    # The run does not count the request by which it checks what a reference supports.
    last_n = "off" if method == "rl" else "auto"
    common = {"num_steps": 2, "eval_every": 2, "prompt_logprobs_last_n": last_n, "budget": {"prices": str(prices)}}
    common |= {"experiment": folder.name}
    common |= {"evaluators": [exact_match()]}
    if method == "rl":
        fields = rl_fields(folder, "rl-cost", mlflow_uri, url) | {"advantage": {"kl_coefficient": 0.1}}
        return RlConfig.model_validate(fields | common | {"compute_post_kl": True} | changes)
    fields = distill_fields(folder, "distill-cost", mlflow_uri, url)
    data = [{"environment": environment(folder, teacher_prompt="Say nothing but letters.", group_size=2)}]
    # The prompts of the steps differ in length.
    rows = [json.dumps({"question": f"Say {'a' * (1 + number)}"}) for number in range(32)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    return OnPolicyConfig.model_validate(fields | {"datasets": data} | common | changes)


def exact_match(max_tokens: int = 4, name: str = "exact_match") -> dict[str, Any]:
    """Return an evaluator of two problems with two answers each."""
    data = Path(__file__).parents[2] / "examples" / "data" / "gsm8k_test.jsonl"
    sampling = {"max_tokens": max_tokens, "num_samples": 2}
    params = {"name": name, "path": str(data), "limit": 2, "renderer_name": "qwen3_instruct", "sampling": sampling}
    return {"builder": "tinker_flows:ExactMatch", "params": params}


class OfUnknownCost(SamplingClientEvaluator):
    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        return {"nothing": 0.0}


def run(config: SamplingMethod) -> TrainResult:
    return rl(config) if isinstance(config, RlConfig) else on_policy_distillation(config)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("schedule", "usd", "num_trained"),
    [({}, 130.0, 2), ({"mode": "async", "max_steps_off_policy": 2}, 200.0, 1)],
    ids=["sync", "async"],
)
def test_a_stopped_run_has_paid_for_all_its_rollouts(
    schedule: dict[str, Any], usd: float, num_trained: int, tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    """A step samples 64 tokens at $1 each; in mode `async`, those of three steps are sampled before the first ends."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps([{"tinker_id": "tiny", "prefill": "$0", "sample": "$1,000,000", "train": "$0"}]))
    fields = rl_fields(tmp_path, f"stopped-{schedule.get('mode', 'sync')}", mlflow_uri, engine_url)
    fields |= {"num_steps": 8, "eval_every": 0, "schedule": schedule, "budget": {"prices": str(prices), "usd": usd}}
    before = engine_tokens(engine_url)
    result = rl(RlConfig.model_validate(fields))
    sampled = engine_tokens(engine_url)["sampled"] - before.get("sampled", 0.0)
    assert "would have cost" in result.stopped
    assert len(curve(result, "loss/base")) == num_trained
    (record, *_) = reversed(
        (tmp_path / "runs" / str(fields["run_name"]) / "checkpoints.jsonl").read_text().splitlines()
    )
    spent = json.loads(record)["spent"]
    assert spent["num_sample_tokens"] == spent["usd"] == sampled
    if not schedule:
        assert result.metrics["cost/num_sample_tokens"] == sampled <= usd


@pytest.mark.parametrize(
    ("method", "max_tokens"),
    [
        ("rl", 6),
        ("on_policy", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("rl", 1), ("on_policy", 6))),
    ],
)
def test_costs(method: str, max_tokens: int, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    config = config_of(method, tmp_path, mlflow_uri, engine_url, rollout={"max_tokens": max_tokens})
    expected = estimate_rollouts(config)
    assert expected.like == ""
    before = engine_tokens(engine_url)
    result = run(config)
    metrics = result.metrics
    after = engine_tokens(engine_url)
    counted = {use: after[use] - before.get(use, 0.0) for use in after}

    costs = {name: metrics[f"cost/{name}"] for name in (*COUNTS, "num_train_tokens", "usd")}
    assert costs["num_train_tokens"] == counted["trained"] + counted["forwarded"]
    assert costs["num_sample_tokens"] == counted["sampled"]
    if method == "on_policy" and max_tokens > 1:  # the teacher scores each rollout of the two steps once
        assert 0 < metrics["cost/num_scoring_tokens"] < costs["num_sample_tokens"]
    # The engine reads the common prompt of several samples once; the others are cache hits.
    assert costs["num_prefill_tokens"] - costs["num_cached_tokens"] == counted["prompt"]
    usd = counted["prompt"] * 4000 + costs["num_cached_tokens"] * 1000
    usd += counted["sampled"] * 900 + costs["num_train_tokens"] * 70
    assert costs["usd"] == pytest.approx(usd / 1e6)

    low, high = expected.low, expected.high
    assert_between(low, costs, high)
    if max_tokens == 1:
        # Two evaluations of two answers to two problems with one to four tokens each.
        assert high.sampled.num_sample_tokens - low.sampled.num_sample_tokens == 2 * 2 * 2 * 3
        assert low.sampled.num_prefill_tokens == high.sampled.num_prefill_tokens == costs["num_prefill_tokens"]

    # The next run of this config has the cost of the first.
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr("flows.estimates.rollouts._measure")  # no environment is opened
        again = estimate_rollouts(config.model_copy(update={"run_name": "next", "seed": 1, "num_steps": 4}))
    assert (again.like, again.like_num_steps) == (config.run_name, 2)
    assert again.low == again.high
    assert again.low.num_train_tokens == 2 * costs["num_train_tokens"]
    assert again.low.usd == pytest.approx(2 * costs["usd"])
    # With other prices, the tokens of the first have these prices.
    free = tmp_path / "free.json"
    free.write_text(json.dumps([{"tinker_id": "tiny", "prefill": "$0", "sample": "$0", "train": "$0"}]))
    repriced = config.model_copy(update={"budget": config.budget.model_copy(update={"prices": str(free)})})
    assert estimate_rollouts(repriced).like == config.run_name
    assert estimate_rollouts(repriced).low.usd == 0
    # A copy of the price table has the same prices, so that the recorded cost counts.
    table = Path(config.budget.prices)
    copy = shutil.copy(table, tmp_path / "copy.json")
    copied = config.model_copy(update={"budget": config.budget.model_copy(update={"prices": str(copy)})})
    MlflowClient(mlflow_uri).log_metric(result.mlflow_run_id, "cost/usd", 0.25, step=99)
    assert estimate_rollouts(copied).low.usd == 0.25
    # The table has other prices than at the time of the run.
    (row,) = json.loads(table.read_text())
    doubled = {key: f"${2 * float(row[key].strip('$').replace(',', ''))}" for key in row.keys() - {"tinker_id"}}
    table.write_text(json.dumps([row | doubled]))
    assert estimate_rollouts(config).low.usd == pytest.approx(2 * costs["usd"])
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_tokens": max_tokens + 1})})
    assert estimate_rollouts(other).like == ""


def test_steps_that_are_not_measured_are_like_the_first(
    tmp_path: Path,
    engine_url: str,
    mlflow_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of("on_policy", tmp_path, mlflow_uri, engine_url, num_steps=4, eval_every=0)
    measured = estimate_rollouts(config)
    monkeypatch.setattr("flows.estimates.rollouts._NUM_MEASURED", 1)
    assumed = estimate_rollouts(config)
    first = estimate_rollouts(config.model_copy(update={"num_steps": 1}))
    assert (measured.num_measured, assumed.num_measured, first.num_measured) == (4, 1, 1)
    rollouts = [result.parts["rollouts"].high.sampled for result in (measured, assumed, first)]
    assert rollouts[1] == rollouts[2].times(4)
    assert rollouts[0].num_sample_tokens == rollouts[1].num_sample_tokens
    assert rollouts[0].num_prefill_tokens != rollouts[1].num_prefill_tokens, "the prompts differ in length"

    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    show_estimate("on_policy_distillation", path, [], as_json=False)
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "the prompts of all steps are assumed to be like those of the first step" in shown


@pytest.mark.parametrize(("regularizers", "is_excluded"), [([], False), ([{"name": "kl", "weight": 0.1}], True)])
def test_terms_on_held_out_groups_are_excluded(
    regularizers: list[dict[str, Any]], is_excluded: bool, tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    """Every evaluation measures the terms, whether or not the report shows examples."""
    fields = rl_fields(tmp_path, "excluded", mlflow_uri, engine_url)
    fields |= {"objective": {"base_loss": "importance_sampling", "regularizers": regularizers}}
    for num_examples in (0, 4):
        config = RlConfig.model_validate(fields | {"report": {"num_examples": num_examples}})
        excluded = estimate_rollouts(config).excluded
        assert ("terms of the objective on held-out groups" in excluded) == is_excluded
        queued = config.model_copy(update={"schedule": config.schedule.model_copy(update={"mode": "async"})})
        replayed = "groups that are sampled again because they became too old"
        assert {*estimate_rollouts(queued).excluded} - {*excluded} == {replayed}


@pytest.mark.parametrize("kind", ["reward model", "judge", "pairwise"])
def test_costs_of_reward_models_and_judges(kind: str, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = rlhf_fields(tmp_path, "judged", mlflow_uri, engine_url) | {"warm_start": {}}
    path = ""
    if kind == "judge":
        del fields["reward"]
        params = {"model": "tiny", "max_tokens": 1}
        fields["judge"] = {"builder": "tinker_flows:PromptedJudgeBuilder", "params": params}
    elif kind == "pairwise":
        del fields["reward"]
        params = {"path": "", "model_name_for_tokenizer": "tiny", "renderer_name": "role_colon"}
        fields["judge"] = {"builder": "tinker_flows:PairwiseBuilder", "params": params}
    else:
        session = tinker.ServiceClient(base_url=engine_url)
        path = session.create_lora_training_client("tiny", rank=4).result().save_state("reward").result().path
    config = RlhfConfig.model_validate(fields).policy_stage("", path)
    rollout = config.rollout.model_copy(update={"max_tokens": 1})
    config = config.model_copy(update={"prompt_logprobs_last_n": "off", "eval_every": 3, "rollout": rollout})
    expected = estimate_rollouts(config)
    before = engine_tokens(engine_url)
    metrics = rl(config).metrics  # pyright: ignore[reportArgumentType]
    after = engine_tokens(engine_url)
    counted = {use: after[use] - before.get(use, 0.0) for use in after}
    assert metrics["cost/num_sample_tokens"] == counted["sampled"]
    assert metrics["cost/num_prefill_tokens"] - metrics["cost/num_cached_tokens"] == counted["prompt"]
    assert "reward model" in expected.parts
    assert not any("compares" in phrase for phrase in expected.excluded)
    low, high = expected.low.sampled, expected.high.sampled
    assert low.num_sample_tokens == metrics["cost/num_sample_tokens"] == high.num_sample_tokens
    # No upper bound: bytes of the untrained model that are no text become three tokens of the reward model each.
    assert low.num_prefill_tokens <= metrics["cost/num_prefill_tokens"]
    # Two steps with two evaluations say nothing about longer runs, which evaluate every three steps.
    of_steps = {num: estimate_rollouts(config.model_copy(update={"num_steps": num})).like for num in (1, 2, 3, 4)}
    assert of_steps == {1: config.run_name, 2: config.run_name, 3: "", 4: ""}


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


def in_all_parts(estimate: CostEstimate) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the bounds of the estimate, and the sums over its parts."""
    bounds = [
        (
            sum(costs.num_train_tokens for costs in parts),
            *(sum(getattr(costs.sampled, name) for costs in parts) for name in COUNTS),
        )
        for parts in zip(*((part.low, part.high) for part in estimate.parts.values()), strict=True)
    ]
    whole = [
        (costs.num_train_tokens, *(getattr(costs.sampled, name) for name in COUNTS))
        for costs in (estimate.low, estimate.high)
    ]
    return whole, bounds


def price_table(folder: Path) -> str:
    """Write prices by which each kind of token has its own cost; return the path."""
    row = {"tinker_id": "tiny", "prefill": "$4,000", "sample": "$900", "train": "$70", "cached_prefill": "$1,000"}
    (folder / "prices.json").write_text(json.dumps([row]))
    return str(folder / "prices.json")


def test_a_budget_covers_the_teacher(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Its scores cost most of each step."""
    fields = distill_fields(tmp_path, "unlimited", mlflow_uri, engine_url) | {"num_steps": 4, "eval_every": 0}
    prompt = "Say nothing but letters. " * 20
    fields |= {"datasets": [{"environment": environment(tmp_path, teacher_prompt=prompt, group_size=2)}]}
    prices = {"prices": price_table(tmp_path)}
    result = on_policy_distillation(OnPolicyConfig.model_validate(fields | {"budget": prices}))
    history = MlflowClient(mlflow_uri).get_metric_history(result.mlflow_run_id, "cost/usd")
    usd = {point.step: point.value for point in history}
    budget = prices | {"usd": (usd[2] + usd[3]) / 2}
    limited = on_policy_distillation(OnPolicyConfig.model_validate(fields | {"run_name": "limited", "budget": budget}))
    assert "would have cost" in limited.stopped
    assert limited.num_steps in (2, 3)
    assert limited.metrics["cost/budget_share"] <= 1


def assert_between(low: TokenCosts, costs: dict[str, float], high: TokenCosts) -> None:
    assert low.num_train_tokens <= costs["num_train_tokens"] <= high.num_train_tokens
    assert is_between(low.usd, costs["usd"], high.usd)
    for name in COUNTS:
        assert getattr(low.sampled, name) <= costs[name] <= getattr(high.sampled, name)


def is_between(low: float | None, usd: float, high: float | None) -> bool:
    """Return whether a price is within known bounds, up to the rounding of sums."""
    assert low is not None
    assert high is not None
    return low * (1 - 1e-9) <= usd <= high * (1 + 1e-9)


def counted_since(url: str, before: dict[str, float]) -> dict[str, float]:
    return {use: value - before.get(use, 0.0) for use, value in engine_tokens(url).items()}


@pytest.mark.parametrize(("max_tokens", "top_k"), [(1, 4), (6, 4), (6, 0)])
def test_costs_of_teacher_data(max_tokens: int, top_k: int, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """The second epoch reuses what the teacher sampled and scored in the first."""
    fields = distill_fields(tmp_path, "taught", mlflow_uri, engine_url)
    data = environment(tmp_path, num_train=8, teacher_prompt="Say nothing but letters.", group_size=2)
    fields |= {"datasets": [{"environment": data}], "num_steps": 3, "eval_every": 2, "top_k": top_k}
    fields |= {"report": {"max_tokens": max_tokens}}
    fields |= {"experiment": tmp_path.name, "rollout": {"max_tokens": max_tokens}}
    config = OffPolicyConfig.model_validate(fields | {"budget": {"prices": price_table(tmp_path)}})
    expected = estimate_teacher_data(config)
    assert expected.like == ""
    before = engine_tokens(engine_url)
    metrics = off_policy_distillation(config).metrics  # pyright: ignore[reportArgumentType]
    counted = counted_since(engine_url, before)
    costs = {name: metrics[f"cost/{name}"] for name in (*COUNTS, "num_train_tokens", "usd")}
    assert costs["num_train_tokens"] == counted["trained"] + counted["forwarded"]
    assert costs["num_sample_tokens"] == counted["sampled"]
    assert costs["num_prefill_tokens"] - costs["num_cached_tokens"] == counted["prompt"]
    assert_between(expected.low, costs, expected.high)
    if max_tokens == 1:
        assert expected.low.sampled == expected.high.sampled
    assert "teachers" in expected.parts
    whole, parts = in_all_parts(expected)
    assert whole == parts
    again = estimate_teacher_data(config.model_copy(update={"run_name": "next", "learning_rate": 1e-3}))
    assert again.like == "taught"
    assert (again.low.num_train_tokens, again.low.usd) == (costs["num_train_tokens"], pytest.approx(costs["usd"]))
    # The teacher samples each prompt once, so the cost of other numbers of steps is not proportional.
    assert estimate_teacher_data(config.model_copy(update={"num_steps": 4})).like == ""


def test_costs_of_given_data(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """The teacher only scores the data, so the tokens of the samplers are known; long prompts are left out."""
    fields = distill_fields(tmp_path, "given", mlflow_uri, engine_url) | {"top_k": 4, "num_steps": 3}
    data = sft_fields(tmp_path, "", "")["data"]
    data["params"]["common_config"]["max_length"] = 280
    fields |= {"datasets": [{"data": data}], "report": {"num_examples": 0}}
    fields |= {"budget": {"prices": price_table(tmp_path)}}
    config = OffPolicyConfig.model_validate(fields)
    expected = estimate_teacher_data(config)
    before = engine_tokens(engine_url)
    metrics = off_policy_distillation(config).metrics  # pyright: ignore[reportArgumentType]
    counted = counted_since(engine_url, before)
    low, high = expected.low, expected.high
    assert low.sampled == high.sampled
    assert low.sampled.num_prefill_tokens == metrics["cost/num_prefill_tokens"] == counted["prompt"]
    assert low.sampled.num_sample_tokens == metrics["cost/num_sample_tokens"] == counted["sampled"]
    assert metrics["cost/num_train_tokens"] == counted["trained"] + counted["forwarded"]
    assert low.num_train_tokens <= metrics["cost/num_train_tokens"] <= high.num_train_tokens


def test_costs_of_supervised_evaluators(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Answers of one token each are exactly as many as the estimate bounds."""
    fields = sft_fields(tmp_path, "evaluated", mlflow_uri, engine_url) | {"objective": {}, "num_steps": 5}
    fields["experiment"] = "supervised-evaluators"  # without earlier runs, whose pace the estimate would use
    fields |= {"eval_every": 2, "infrequent_eval_every": 4, "report": {"num_examples": 0}}
    fields |= {"evaluators": [exact_match(1), {"builder": f"{__name__}:OfUnknownCost"}]}
    fields |= {"infrequent_evaluators": [exact_match(1, "rare_match")], "budget": {"prices": price_table(tmp_path)}}
    config = SftConfig.model_validate(fields)
    expected = estimate(config)
    assert expected.excluded == (f"{__name__}:OfUnknownCost (evaluators.1)",)
    before = engine_tokens(engine_url)
    metrics = sft(config).metrics  # pyright: ignore[reportArgumentType]
    counted = counted_since(engine_url, before)
    assert expected.evaluators.num_sample_tokens == counted["sampled"] == (4 + 3) * 2 * 2
    assert expected.evaluators.num_prefill_tokens == metrics["cost/num_prefill_tokens"]
    assert expected.usd == pytest.approx(metrics["cost/usd"])


def test_costs_of_all_stages(
    tmp_path: Path, engine_url: str, mlflow_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = rlhf_fields(tmp_path, "stages", mlflow_uri, engine_url) | {"experiment": tmp_path.name}
    for training in (fields["warm_start"], fields["reward"]["training"], fields["policy"]["training"]):
        training |= {"prompt_logprobs_last_n": "off", "report": {"num_examples": 0}}
    fields |= {"budget": {"usd": 1000, "prices": price_table(tmp_path)}}
    config = RlhfConfig.model_validate(fields)
    expected = estimate_rlhf(config)
    assert list(expected.stages) == ["sft", "reward", "policy"]
    before = engine_tokens(engine_url)
    rlhf(config)  # pyright: ignore[reportArgumentType]
    counted = counted_since(engine_url, before)
    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name(tmp_path.name)
    assert experiment is not None
    runs = {str(run.info.run_name): run.data.metrics for run in client.search_runs([experiment.experiment_id])}
    spent = {
        name: sum(metrics.get(f"cost/{name}", 0.0) for metrics in runs.values())
        for name in (*COUNTS, "num_train_tokens", "usd")
    }
    assert spent["num_train_tokens"] == counted["trained"] + counted["forwarded"]
    assert spent["num_sample_tokens"] == counted["sampled"]
    assert spent["num_prefill_tokens"] - spent["num_cached_tokens"] == counted["prompt"]
    for stage in ("sft", "reward"):
        supervised = expected.stages[stage]
        assert isinstance(supervised, Estimate)
        assert supervised.num_train_tokens >= runs[f"stages-{stage}"]["cost/num_train_tokens"]
    policy = expected.stages["policy"]
    assert isinstance(policy, CostEstimate)
    spent_by_policy = runs["stages-policy"]
    assert policy.low.num_train_tokens <= spent_by_policy["cost/num_train_tokens"] <= policy.high.num_train_tokens
    assert is_between(policy.low.usd, spent_by_policy["cost/usd"], float("inf"))
    assert is_between(expected.usd_low, spent["usd"], float("inf"))
    used = spent_by_policy["cost/usd"] / spent_by_policy["cost/budget_share"]
    assert used == pytest.approx(1000 - spent["usd"] + spent_by_policy["cost/usd"])
    # The next run has other weights, but the same config.
    warm_start = {**fields["warm_start"], "evaluators": [exact_match()]}
    next_fields = fields | {"run_name": "next", "warm_start": warm_start}
    stages = estimate_rlhf(RlhfConfig.model_validate(next_fields)).stages
    again, warm = stages["policy"], stages["sft"]
    assert isinstance(again, CostEstimate)
    assert isinstance(warm, Estimate)
    # Two evaluations of two problems with two answers of at most four tokens.
    assert warm.evaluators.num_sample_tokens == 2 * 2 * 2 * 4
    assert again.like == "stages-policy"
    assert again.low.usd == pytest.approx(spent_by_policy["cost/usd"])
    (tmp_path / "next.json").write_text(json.dumps(next_fields))
    capsys.readouterr()
    show_estimate("rlhf", tmp_path / "next.json", [], as_json=False)
    shown = capsys.readouterr().out
    assert "cost of run stages-policy (2 steps)" in shown
    assert re.search(rf"tokens sampled, at most\W+{2 * 2 * 2 * 4}\b", shown), shown
    show_estimate("rlhf", tmp_path / "next.json", ["policy.training.rollout.max_tokens=9"], as_json=True)
    printed = json.loads(capsys.readouterr().out)["stages"]["policy"]
    assert printed["parts"]["training"]["high"]["num_train_tokens"] == printed["high"]["num_train_tokens"] > 0


def test_evaluation_costs(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = sft_fields(tmp_path, "measured", mlflow_uri, engine_url)
    config = {name: fields[name] for name in ("run_name", "model", "base_url", "storage", "tracking", "data")}
    config |= {"checkpoint": "base", "evaluators": [exact_match()]}
    validated = EvaluateConfig.model_validate(
        config | {"budget": {"prices": price_table(tmp_path)}, "experiment": tmp_path.name}
    )
    expected = estimate_evaluation(validated)
    before = engine_tokens(engine_url)
    measured = evaluate(validated)
    cost = measured.cost
    counted = counted_since(engine_url, before)
    assert cost["cost/num_train_tokens"] == counted["forwarded"] > 0
    assert cost["cost/num_sample_tokens"] == counted["sampled"] > 0
    assert cost["cost/num_prefill_tokens"] - cost["cost/num_cached_tokens"] == counted["prompt"]
    low, high = expected.low, expected.high
    assert low.num_train_tokens == high.num_train_tokens == cost["cost/num_train_tokens"]
    assert low.sampled.num_prefill_tokens == high.sampled.num_prefill_tokens == cost["cost/num_prefill_tokens"]
    assert low.sampled.num_cached_tokens == high.sampled.num_cached_tokens == cost["cost/num_cached_tokens"]
    assert low.sampled.num_sample_tokens <= cost["cost/num_sample_tokens"] <= high.sampled.num_sample_tokens
    assert high.sampled.num_sample_tokens == 2 * 2 * 4
    assert is_between(low.usd, cost["cost/usd"], high.usd)
    assert list(expected.parts) == ["held-out data", "tinker_flows:ExactMatch (evaluators.0)"]
    again = estimate_evaluation(validated.model_copy(update={"run_name": "next"}))
    assert (again.like, again.low.usd) == ("measured", pytest.approx(cost["cost/usd"]))
    # An evaluation that its budget has stopped has cost only a part.
    MlflowClient(mlflow_uri).set_tag(measured.mlflow_run_id, "tinker_flows.stopped", "The evaluation stopped.")
    assert estimate_evaluation(validated).like == ""


def test_a_budget_of_all_stages_ends_before_the_next_stage(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = rlhf_fields(tmp_path, "spent", mlflow_uri, engine_url)
    fields |= {"budget": {"usd": 1000, "prices": price_table(tmp_path)}}
    with pytest.raises(ValueError, match="a stage has a budget of its own"):
        RlhfConfig.model_validate(fields | {"warm_start": fields["warm_start"] | {"budget": {"usd": 1}}})
    config = RlhfConfig.model_validate(fields)
    result = sft(within_budget(config.warm_start_stage(), config.budget, []))  # pyright: ignore[reportArgumentType]
    cost = result.metrics["cost/usd"]
    limited = config.model_copy(update={"budget": config.budget.model_copy(update={"usd": cost})})
    unpriced = replace(result, metrics={name: value for name, value in result.metrics.items() if name != "cost/usd"})
    with pytest.raises(ConfigError, match=r"The cost of spent-sft in dollars is unknown, .*: remove budget\.usd, or"):
        within_budget(config.reward_stage(), config.budget, [unpriced])
    with pytest.raises(ConfigError, match=r"The stages before spent-reward have spent .* of budget\.usd=.*: raise it"):
        rlhf(limited)  # pyright: ignore[reportArgumentType]

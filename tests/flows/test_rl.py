"""The rl flow on the tiny model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import tinker
from healthy_metrics import HEALTHY
from metric_history import curve
from mlflow import MlflowClient
from rl_config import rl_fields
from tinker import types
from tinker_cookbook.rl.types import Transition
from torch import Tensor

from blocks import RunStorage
from blocks.errors import ConfigError
from flows.config.rl import RlConfig
from flows.rl import rl
from flows.runs.result import TrainResult
from objectives.batch import Batch, Outputs
from objectives.term import regularizer
from tasks.rl import rollout_source
from tasks.rl.health import REWARD
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import compute_group_metrics
from tasks.training.checkpoints import read_records, step_of

NUM_STEPS = 4

pytestmark = pytest.mark.usefixtures("api_key")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: str, engine_url: str, mlflow_uri: str
) -> tuple[Path, dict[str, Any], TrainResult]:
    """Run four steps with a term on the samples, a term on the reference, and an evaluation."""
    folder = tmp_path_factory.mktemp("rl")
    terms = [{"name": "kl", "weight": 0.01}, {"name": "length", "weight": 0.01, "params": {"free": 0}}]
    config = rl_fields(folder, "rl", mlflow_uri, engine_url) | {
        "eval_every": NUM_STEPS,
        "objective": {"base_loss": "importance_sampling", "regularizers": terms},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        return folder, config, rl(RlConfig.model_validate(config))


def test_sync_steps_are_on_policy(run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str) -> None:
    _, _, result = run
    for key in ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2"):
        assert curve(result, key) == pytest.approx([0.0] * NUM_STEPS, abs=1e-4)
    assert all(entropy > 0 for entropy in curve(result, "optim/entropy"))
    assert curve(result, "env/all/total_episodes") == [8.0] * NUM_STEPS
    tags = [curve(result, f"env/letter_{letter}/reward/total") for letter in "ae"]
    total = curve(result, "env/all/reward/total")
    assert [sum(pair) / 2 for pair in zip(*tags, strict=True)] == pytest.approx(total)
    assert curve(result, "term/kl/value")[0] == pytest.approx(0, abs=1e-9)
    assert len(curve(result, "test/env/all/reward/total")) == 2
    assert curve(result, "test/term/kl/value")[0] == pytest.approx(0, abs=1e-9)
    # Without free tokens, the penalty is the mean length over the buffer of 128 tokens.
    lengths = curve(result, "test/env/all/ac_tokens_per_turn")
    assert curve(result, "test/term/length/value") == pytest.approx([length / 128 for length in lengths])


def test_the_final_evaluation_is_watched(
    run: tuple[Path, dict[str, Any], TrainResult], prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: dict[int, bool] = {}
    watch = rollout_source.RolloutSource.observe

    def observe(source: rollout_source.RolloutSource, step: int, metrics: dict[str, float]) -> Any:
        observed[step] = f"test/{REWARD}" in metrics
        return watch(source, step, metrics)

    monkeypatch.setattr(rollout_source.RolloutSource, "observe", observe)
    _, config, _ = run
    rl(RlConfig.model_validate(config | {"run_name": "watched", "num_steps": 2, "eval_every": 1}))
    assert observed == {0: True, 1: True, 2: True}


def test_transcripts_and_traces(run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str) -> None:
    folder, _, result = run
    page = (folder / "runs" / "rl" / "transcripts-000000.html").read_text()
    assert page.count("<details>") == 2
    assert page.count("<h3>Answer ") == 8
    assert "Say a 8 times." in page
    assert "Group 0 letter_a" in page
    assert "num_letters" in page
    assert re.search(r'<span title="-\d\.\d\d" style="background: rgba\(220, 90, 0, 0\.\d\d\)">', page)
    assert re.search(r"Values of the terms over the step: kl 0, length \S+\. Each trained", page)
    assert len(re.findall(r"<p>kl 0, length \S+</p>", page)) == 8
    client = MlflowClient(mlflow_uri)
    artifacts = client.list_artifacts(result.mlflow_run_id, "transcripts")
    assert [artifact.path for artifact in artifacts] == ["transcripts/000000.html"]
    experiment = client.get_run(result.mlflow_run_id).info.experiment_id
    traces = client.search_traces(locations=[experiment], run_id=result.mlflow_run_id)
    assert sorted(trace.info.tags["tags"] for trace in traces) == ["letter_a", "letter_e"]
    assert all(len(trace.data.spans) == 1 + 2 * 4 for trace in traces)


def test_stream_of_minibatches_equals_the_whole_batch(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, whole = run
    schedule = {"mode": "stream", "num_minibatches": 2}
    result = rl(RlConfig.model_validate(config | {"run_name": "stream", "schedule": schedule, "num_steps": 2}))
    for key in ("term/kl/weight", "cost/num_prefill_tokens", "env/all/reward/total", "loss/total", "term/length/value"):
        actual, expected = (curve(finished, key)[:2] for finished in (result, whole))
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5), key


def test_a_run_of_an_older_format_keeps_the_unweighted_kl(
    tmp_path: Path, prefect_server: str, engine_url: str, mlflow_uri: str
) -> None:
    fields = rl_fields(tmp_path, "older-format", mlflow_uri, engine_url) | {
        "num_steps": 2,
        "eval_every": 0,
        "checkpoint_every": 1,
        "objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.1}]},
    }
    directory = Path(rl(RlConfig.model_validate(fields)).directory)

    def weighted() -> list[bool]:
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return ["term/kl/prefix_ratio_max" in json.loads(line) for line in lines if "term/kl/value" in json.loads(line)]

    assert weighted() == [True, True]
    recorded = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**recorded, "format_version": 2}))
    records = (directory / "checkpoints.jsonl").read_text().splitlines()
    periodic = [line for line in records if not json.loads(line).get("final")]
    (directory / "checkpoints.jsonl").write_text("".join(f"{line}\n" for line in periodic))
    assert rl(RlConfig.model_validate(fields)).resumed_from == 1
    assert weighted() == [True, False]


def test_samples_of_a_low_temperature_train_with_their_own_logprobs(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, _ = run
    fields = config | {"run_name": "cold", "num_steps": 1, "eval_every": 0}
    cold = {"max_tokens": 8, "temperature": 0.2}
    # The tiny model is untrained, so that its likeliest tokens have little of the probability.
    with pytest.raises(ConfigError, match=r"logprobs of samples of temperature=0.2 have an error of up to .* nats"):
        rl(RlConfig.model_validate(fields | {"rollout": cold | {"num_candidates": 5}}))
    exact = rl(RlConfig.model_validate(fields | {"run_name": "exact", "rollout": cold | {"num_candidates": 300}}))
    assert curve(exact, "rollout/logprob_error_max")[0] < 1e-3
    # On-policy, the divergence of the samples' distribution from the policy is that of the temperature.
    assert curve(exact, "optim/kl_sample_train_v1")[0] > 0.02
    service = rl(RlConfig.model_validate(fields | {"run_name": "raw", "rollout": cold | {"logprobs": "service"}}))
    assert curve(service, "optim/kl_sample_train_v1")[0] == pytest.approx(0, abs=1e-4)


ASYNC = {
    "eval_every": 0,
    "schedule": {"mode": "async", "max_steps_off_policy": 2},
    "objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.01}]},
    "health": {"patience": 2},
}


def test_async_samples_are_corrected_and_measured_by_age(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, _ = run
    result = rl(RlConfig.model_validate(config | ASYNC | {"run_name": "corrected"}))
    data = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data
    tags, metrics = data.tags, data.metrics
    assert tags["tinker_flows.correction"] == "ratio token, off_policy_above 0.05"
    assert tags["tinker_flows.passes"].startswith("A step takes one pass of the service")
    assert {f"mismatch/staleness_{age}/kl_k3" for age in (0, 1)} & metrics.keys()
    assert 0 < metrics["mismatch/ess_sequence"] <= metrics["mismatch/position_1/ess"] <= 1 + 1e-6
    assert "mismatch/masked" in metrics
    assert "term/base/factor_mean" in metrics
    assert metrics["optim/grad_norm"] > 0, "the service reports it although the run does not clip"
    times = ("rollout", "sampling", "environment", "forward_backward", "optim_step", "batch", "step")
    assert all(metrics[f"time/{name}"] >= 0 for name in times)
    assert metrics["time/sampling"] <= metrics["time/rollout"]
    assert metrics["throughput/train_tokens_per_s"] * metrics["time/step"] == pytest.approx(metrics["num_tokens"])
    assert metrics["throughput/sample_tokens_per_s"] > 0
    assert {"async/groups_ready", "async/groups_running"} <= metrics.keys()
    # The untrained model never ends its answers.
    assert metrics["rollout/truncated"] > 0.5
    assert "raise rollout.max_tokens" in tags["tinker_flows.warning.health.truncated"]
    report = Path(result.report).read_text()
    assert "Health of reinforcement learning" in report
    assert "The share of truncated completions has been above 0.5" in report


def test_a_correction_of_whole_sequences_takes_one_pass(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, _ = run
    correction = {"ratio": "sequence", "bound": "mask", "low": 0.5, "off_policy_above": 0.1}
    result = rl(RlConfig.model_validate(config | ASYNC | {"run_name": "sequence", "correction": correction}))
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert tags["tinker_flows.correction"] == "ratio sequence, bound mask, low 0.5, off_policy_above 0.1"
    assert tags["tinker_flows.passes"].startswith("A step takes one pass of the service")


def test_the_health_watch_reads_metrics_of_a_run(run: tuple[Path, dict[str, Any], TrainResult]) -> None:
    """All metrics whose faults test_health injects, besides those of `async` and of other temperatures than 1."""
    _, _, result = run
    watched = set(HEALTHY) - {"async/stale_share", "rollout/logprob_error"}
    assert {key for key in (*watched, f"test/{REWARD}") if not curve(result, key)} == set()


@pytest.mark.parametrize(("check", "delay_s"), [("failed", 3600.0), ("slow", 1.5)])
def test_dead_and_slow_environments_warn(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str, check: str, delay_s: float
) -> None:
    """Environments of one of two groups never answer, or those of both take longer than their completions."""
    _, config, _ = run
    fails = check == "failed"
    params = {**config["environment"]["params"], "delay_s": delay_s, "delayed": "a" if fails else "ae"}
    changed = {"run_name": f"environments-{check}", "num_steps": 1, "eval_every": int(fails)}
    changed |= {"health": {"patience": 1, "environment_above": 0.3}}
    changed |= {"environment": {"builder": "rollout_parts:DelayedLettersBuilder", "params": params}}
    changed |= {"objective": {"base_loss": "importance_sampling"}}
    changed |= {"rollout": {"max_tokens": 1, "timeout_s": 3.0, "max_retries": 0}}
    result = rl(RlConfig.model_validate(config | changed))
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    expected = {"failed": "check the environment", "slow": "make them faster"}[check]
    assert expected in tags[f"tinker_flows.warning.health.{check}"]
    assert ("TimeoutError" in tags.get("tinker_flows.warning.rollout.failed", "")) == fails
    assert ("leave out groups" in tags.get("tinker_flows.warning.rollout.held_out_failed", "")) == fails


@pytest.mark.parametrize(
    ("mode", "part", "group"),
    [
        ("sync", "turns", "rollout-0-1"),
        pytest.param("async", "rewards", "rollout-0-1", marks=pytest.mark.slow),
        pytest.param("sync", "rewards", "held-out-1", marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_hangs_warns_during_its_step(
    run: tuple[Path, dict[str, Any], TrainResult],
    mlflow_uri: str,
    prefect_server: str,
    mode: str,
    part: str,
    group: str,
) -> None:
    """The environment answers after the warning, so without it the run would never end.

    The time limit of turns does not end rewards that hang.
    """
    _, config, _ = run
    experiment, is_held_out = f"hangs-{mode}-{group}", group.startswith("held-out")
    params = {"tracking": mlflow_uri, "experiment": experiment, "tag": "tinker_flows.warning.health.hang", "part": part}
    params |= config["environment"]["params"] | ({"is_held_out": True, "num_batches": 1} if is_held_out else {})
    changed = {"run_name": experiment, "experiment": experiment, "num_steps": 1, "eval_every": int(is_held_out)}
    changed |= {"schedule": {"mode": mode}, "objective": {"base_loss": "importance_sampling"}}
    changed |= {"health": {"hang_seconds": 0.5, "hang_factor": 1.5}}
    changed |= {"rollout": {"timeout_s": 5.0}} if part == "rewards" else {}
    changed |= {"environment": {"builder": "rollout_parts:SilentLettersBuilder", "params": params}}
    result = rl(RlConfig.model_validate(config | changed))
    (text,) = [text for text in result.warnings if "has not responded" in text]
    assert f"The environment, reward, hook or completer of {group} has not responded for" in text
    assert (
        "ends rollouts that take too long, and rollout.termination.grader_timeout_seconds ends hanging rewards." in text
    )
    query = {"filter": {"event": {"name": ["tinker-flows.health"]}}}
    for _ in range(100):  # the server stores events in the background
        events = httpx.post(f"{prefect_server}/events/filter", json=query, timeout=30).json()["events"]
        payloads = [event["payload"] for event in events if event["payload"]["run_name"] == experiment]
        if payloads:
            break
        time.sleep(0.1)
    assert [(payload["check"], payload["step"]) for payload in payloads] == [("hang", 0)]


def test_second_update_of_a_step_is_off_policy(run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str) -> None:
    _, config, _ = run
    changed = {
        "run_name": "substeps",
        "schedule": {"num_substeps": 2, "groups_per_batch": 4},
        "num_steps": 2,
        "eval_every": 0,
        # Its gradient is never 0; the gradient of the rewards may be.
        "objective": {"base_loss": "enhanced_ppo", "regularizers": [{"name": "confidence", "weight": 0.1}]},
        "advantage": {"estimator": "gae", "kl_coefficient": 0.01},
    }
    result = rl(RlConfig.model_validate(config | changed))
    assert curve(result, "env/all/total_episodes") == [16.0] * 2
    policy_loss = curve(result, "policy_loss")
    assert policy_loss == curve(result, "term/base/policy")
    assert policy_loss != curve(result, "loss/base"), "which includes the entropy and the critic"
    assert min(curve(result, "optim/kl_sample_train_v2")) > 1e-6
    at_base, moved = curve(result, "kl_policy_base")
    assert abs(at_base) < 1e-4 < abs(moved)
    for key in ("policy_loss", "value_loss", "clip_fraction", "advantage/std"):
        assert len(curve(result, key)) == 2


def test_end_of_a_run_does_not_affect_another_run_of_the_process(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, _ = run
    small = config | {"eval_every": 0, "objective": {"base_loss": "importance_sampling"}}
    schedule = {"mode": "async", "max_steps_off_policy": 2}
    names = {"long": 6, "short-1": 1, "short-2": 1}
    configs = [
        RlConfig.model_validate(small | {"run_name": name, "num_steps": num_steps, "schedule": schedule})
        for name, num_steps in names.items()
    ]
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(copy_context().run, rl, configs[0])
        # Both end while the long run still rolls out its groups.
        short = [threads.submit(copy_context().run, rl, config) for config in configs[1:]]
        results = [future.result(200) for future in (long, *short)]
    for result, num_steps in zip(results, names.values(), strict=True):
        assert result.num_steps == num_steps
        assert curve(result, "env/all/total_episodes") == [8.0] * num_steps


def test_async_run_respects_max_steps_off_policy(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, _ = run
    schedule = {"mode": "async", "max_steps_off_policy": 2}
    first = config | {"run_name": "async", "schedule": schedule, "num_steps": 3, "eval_every": 0}
    rl(RlConfig.model_validate(first))
    later = {"run_name": "async-on", "resume": "async@3", "num_steps": 6}
    result = rl(RlConfig.model_validate(first | later))
    staleness = curve(result, "async/staleness_max")
    assert staleness[0] == 0
    assert 0 < max(staleness) <= 2
    assert curve(result, "env/all/total_episodes") == [8.0] * 3


@pytest.mark.parametrize("schedule", [{}, {"mode": "stream", "num_minibatches": 2}, {"mode": "async"}])
def test_post_kl_is_that_of_the_saved_weights(
    run: tuple[Path, dict[str, Any], TrainResult],
    mlflow_uri: str,
    engine_url: str,
    monkeypatch: pytest.MonkeyPatch,
    schedule: dict[str, Any],
) -> None:
    """The SDK alone scores the samples of both steps with the checkpoints after them."""
    _, config, _ = run
    sampled: list[list[Transition]] = []

    def record(groups: Sequence[Group]) -> dict[str, float]:
        trajectories = [
            trajectory for group in groups if group.trajectories for trajectory in group.trajectories.trajectories_G
        ]
        sampled.append([turn for trajectory in trajectories for turn in trajectory.transitions])
        return compute_group_metrics(groups)

    monkeypatch.setattr(rollout_source, "compute_group_metrics", record)
    score, firsts = rollout_source.score_sequences, list[int]()

    def score_ends(sampler: Any, sequences: Any, action: str, first_logprobs: Any) -> Any:
        firsts.extend(first_logprobs)
        return score(sampler, sequences, action, first_logprobs)

    monkeypatch.setattr(rollout_source, "score_sequences", score_ends)
    name = f"post-{schedule.get('mode', 'sync')}"
    changed = {"run_name": name, "num_steps": 2, "checkpoint_every": 1, "eval_every": 0, "compute_post_kl": True}
    changed |= {"schedule": schedule, "objective": {"base_loss": "importance_sampling"}, "learning_rate": 0.1}
    changed |= {"correction": "none"}  # it drops what the large updates leave behind
    result = rl(RlConfig.model_validate(config | changed))
    session = tinker.ServiceClient(base_url=engine_url)
    directory = RunStorage(url=config["storage"]).run_directory(name)
    paths = {step_of(record): record.state_path for record in read_records(directory).checkpoints}
    num_scored, changes_of_steps = 0, list[float]()
    for step, turns in enumerate(sampled):
        weights = session.create_training_client_from_state(paths[step + 1] or "").result()
        sampler = weights.save_weights_and_get_sampling_client().result()
        changes: list[float] = []
        for turn in turns:
            sequence = types.ModelInput.from_ints([*turn.ob.to_ints(), *turn.ac.tokens])
            after = sampler.compute_logprobs(sequence).result()[turn.ob.length :]
            changes += [before - (value or 0.0) for before, value in zip(turn.ac.logprobs, after, strict=True)]
            num_scored += sequence.length
        v1, v2 = fmean(changes), fmean(change**2 for change in changes) / 2
        assert curve(result, "kl_pre_post_v1")[step] == pytest.approx(v1, abs=1e-4)
        assert curve(result, "kl_pre_post_v2")[step] == pytest.approx(v2, abs=1e-4)
        changes_of_steps.append(v2)
    assert max(changes_of_steps) > 1e-4  # with equal rewards in all groups, a step changes nothing
    expected = [turn.ob.length - 1 for turns in sampled for turn in turns]
    assert sorted(firsts) == sorted(expected), "the prompts are not scored"
    num_prompt = sum(turn.ob.length for turns in sampled for turn in turns)
    assert result.metrics["cost/num_prefill_tokens"] >= num_prompt + num_scored
    if schedule.get("mode") != "async":
        assert result.metrics["cost/num_prefill_tokens"] == num_prompt + num_scored


def test_completer_and_hook_of_the_user(run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str) -> None:
    """The completer stops after three tokens; the hook charges rollouts that contain an even token."""
    _, config, _ = run
    small = config | {"num_steps": 2, "eval_every": 2, "objective": {"base_loss": "importance_sampling"}}
    rollouts = {"max_tokens": 8, "completer": {"builder": "rollout_parts:Short", "params": {"length": 3}}}
    hook = {"builder": "rollout_parts:charge_even_tokens", "params": {"price": 0.5}}
    short = rl(RlConfig.model_validate(small | {"run_name": "short", "rollout": rollouts}))
    again = rl(RlConfig.model_validate(small | {"run_name": "short-again", "rollout": rollouts}))
    charged = rl(RlConfig.model_validate(small | {"run_name": "charged", "rollout": rollouts | {"hook": hook}}))
    assert curve(short, "env/all/ac_tokens_per_turn")[0] <= 3
    assert curve(short, "test/env/all/ac_tokens_per_turn")[0] <= 3
    # The completer returns the service's logprobs, so that the policy is the sampler.
    assert curve(short, "optim/kl_sample_train_v2") == pytest.approx([0.0] * 2, abs=1e-6)
    reward = "env/all/reward/total"
    assert curve(again, reward)[0] == curve(short, reward)[0]
    share = curve(charged, "hook/even/rollouts")[0]
    assert 0 < share <= 1
    difference = curve(short, reward)[0] - curve(charged, reward)[0]
    assert difference == pytest.approx(0.5 * share)
    assert curve(charged, "hook/even/stopped") == [0.0] * 2


@pytest.mark.parametrize("schedule", [{}, {"mode": "stream", "num_minibatches": 2}, {"mode": "async"}])
def test_a_critic_judges_before_it_learns(
    run: tuple[Path, dict[str, Any], TrainResult], schedule: dict[str, Any]
) -> None:
    _, config, _ = run
    advantage = {"estimator": "gae", "critic": {"features": "rollout_parts:describe_prompt", "steps": 2}}
    name = f"critic-{schedule.get('mode', 'sync')}"
    fields = config | {"run_name": name, "schedule": schedule, "advantage": advantage, "eval_every": 0}
    result = rl(RlConfig.model_validate(fields))
    turns = curve(result, "critic/num_turns")
    # Two groups of four members with one turn each, of which a step forgets half.
    assert turns == [0.0, 8.0, 12.0, 14.0]
    assert len(curve(result, "value_loss")) == len(turns)
    directory = RunStorage(url=config["storage"]).run_directory(name)
    last = read_records(directory).checkpoints[0].extra["source"]["critic"]
    assert last["features"] == "rollout_parts:describe_prompt"
    assert last["gram"][0][0] == 15.0


def test_a_critic_does_not_learn_from_a_skipped_step(run: tuple[Path, dict[str, Any], TrainResult]) -> None:
    """A restarted run does not sample the groups of the step again."""
    _, config, _ = run
    values = iter([1.0, float("nan"), 1.0, 1.0])

    @regularizer("test_nan_once")
    def nan_once(outputs: Outputs, batch: Batch) -> Tensor:
        return outputs.logprobs_DT * next(values)

    fields = config | {"run_name": "skipped", "advantage": {"estimator": "gae", "critic": {}}, "eval_every": 0}
    fields |= {"guards": {"not_finite": "skip"}}
    fields |= {"objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "test_nan_once"}]}}
    result = rl(RlConfig.model_validate(fields))
    assert curve(result, "critic/num_turns") == [0.0, 8.0, 14.0]


def test_invalid_features_of_a_critic_end_the_run(run: tuple[Path, dict[str, Any], TrainResult]) -> None:
    _, config, _ = run
    advantage = {"estimator": "gae", "critic": {"features": "rollout_parts:describe_badly"}}
    with pytest.raises(ConfigError, match="returned the feature nan: return finite numbers"):
        rl(RlConfig.model_validate(config | {"run_name": "nan", "advantage": advantage}))


def test_rewards_of_a_hook_and_a_reward_that_is_not_reported(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    """The reward of a hook is a named reward; the run says so, and announces a name without a value, also resumed."""
    _, config, _ = run
    hook = {"builder": "rollout_parts:charge_even_tokens", "params": {"price": 0.5}}
    fields = config | {"num_steps": 2, "eval_every": 0, "checkpoint_every": 1, "run_name": "named"}
    fields |= {"objective": {"base_loss": "importance_sampling"}, "rollout": {"max_tokens": 8, "hook": hook}}
    result = rl(RlConfig.model_validate(fields | {"rewards": {"hook/even/reward": {}, "absent": {}}}))
    share = curve(result, "hook/even/rollouts")[0]
    mean = curve(result, "env/all/hook/even/reward")[0]
    assert curve(result, "reward/absent/value") == [0.0] * 2
    assert curve(result, "reward/hook/even/reward/value")[0] == pytest.approx(-0.5 * share)
    assert mean == pytest.approx(-0.5)
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert "'absent', which no completion has reported so far" in tags["tinker_flows.warning.rewards.absent"]
    assert "tinker_flows.warning.pitfall.hook" not in tags
    ignored = rl(RlConfig.model_validate(fields | {"run_name": "ignored", "rewards": {"num_letters": {}}}))
    tags = MlflowClient(mlflow_uri).get_run(ignored.mlflow_run_id).data.tags
    assert "name total, or hook/ACTION/reward" in tags["tinker_flows.warning.pitfall.hook"]


def test_termination_without_a_stop_reason_is_announced(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    _, config, _ = run
    fields = config | {"num_steps": 2, "eval_every": 0, "objective": {"base_loss": "importance_sampling"}}
    rollouts = {"max_tokens": 8, "termination": {"zero_reward_on_limit": True}}
    result = rl(RlConfig.model_validate(fields | {"run_name": "unlimited", "rollout": rollouts}))
    assert curve(result, "rollout/zero_reward_on_limit") == [0.0] * 2
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert "no stop reason in the first step" in tags["tinker_flows.warning.rollout.termination"]


def test_truncated_completions_are_masked_or_penalized(
    run: tuple[Path, dict[str, Any], TrainResult], mlflow_uri: str
) -> None:
    """The untrained model ends few of its answers, or none."""
    _, config, plain = run
    fields = config | {"num_steps": 1, "objective": {"base_loss": "importance_sampling"}}
    masked = rl(
        RlConfig.model_validate(
            fields | {"run_name": "masked", "rollout": {"max_tokens": 8, "truncated": "mask"}, "eval_every": 0}
        )
    )
    share = curve(masked, "rollout/masked")
    assert share == curve(masked, "rollout/truncated")
    tags = MlflowClient(mlflow_uri).get_run(masked.mlflow_run_id).data.tags
    assert (share == [1.0]) == ("tinker_flows.warning.rollout.masked" in tags)
    assert masked.metrics["cost/num_sample_tokens"] == curve(plain, "rollout/num_sampled_tokens")[0]
    assert "Masked rollouts" in Path(masked.report).read_text()

    rollouts = {"max_tokens": 8, "truncated": {"length": 4, "penalty": 0.5}}
    penalized = rl(RlConfig.model_validate(fields | {"run_name": "overlong", "rollout": rollouts, "eval_every": 1}))
    for prefix in ("", "test/"):
        key = f"{prefix}env/all/reward/total"
        penalty = curve(penalized, f"{prefix}env/all/overlong/reward")[0]
        assert -0.5 <= penalty < 0
        difference = curve(penalized, key)[0] - curve(plain, key)[0]
        assert difference == pytest.approx(penalty)


def test_invalid_completers_and_hooks_are_refused(tmp_path: Path, prefect_server: str) -> None:
    for rollouts, message in (
        ({"completer": {"builder": "rollout_parts:Nothing"}}, "rollout.completer.builder is 'rollout_parts:Nothing'"),
        ({"completer": {"builder": "rollout_parts:Short", "params": {"size": 1}}}, "has no parameter 'size'"),
        ({"completer": {"builder": "rollout_parts:charge_even_tokens"}}, "has no parameter sampling_client"),
        ({"hook": {"builder": "rollout_parts:charge_even_tokens", "params": {"cost": 1}}}, "does not take"),
        ({"hook": {"builder": "rollout_parts:Empty"}}, "has no method of a hook: add on_turn_end"),
        ({"hook": {"builder": "rollout_parts:Half"}}, "has only on_grade of tinker-cookbook's hooks"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            rl(RlConfig.model_validate(rl_fields(tmp_path, "wrong", "") | {"rollout": rollouts}))


def test_invalid_modes(tmp_path: Path) -> None:
    fields = rl_fields(tmp_path, "wrong", "")
    for schedule, message in (
        ({"num_minibatches": 2}, "num_minibatches requires the mode stream or async"),
        ({"mode": "stream"}, "set num_minibatches to 2 or more"),
        ({"max_steps_off_policy": 2}, "max_steps_off_policy requires the mode async"),
    ):
        with pytest.raises(ValueError, match=message):
            RlConfig.model_validate(fields | {"schedule": schedule})
    with pytest.raises(ValueError, match="A guard with the policy skip skips whole steps"):
        RlConfig.model_validate(fields | {"schedule": {"num_substeps": 2}, "guards": {"spike": "skip"}})


def test_config_roundtrip(tmp_path: Path) -> None:
    """A resumed run compares its config with the recorded one."""
    config = RlConfig.model_validate(rl_fields(tmp_path, "again", ""))
    assert RlConfig.model_validate_json(config.model_dump_json()) == config


def test_scale_with_another_estimator_is_rejected(tmp_path: Path) -> None:
    fields = rl_fields(tmp_path, "wrong", "") | {"advantage": {"estimator": "leave_one_out", "scale": True}}
    with pytest.raises(ValueError, match="scale requires the estimator group_mean"):
        RlConfig.model_validate(fields)


SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"mode": "stream", "num_minibatches": 2, "groups_per_batch": 2},
    "async": {"mode": "async", "max_steps_off_policy": 1},
}


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", SCHEDULES)
def test_rl_learns(tmp_path: Path, engine_url: str, mlflow_uri: str, mode: str, seed: int) -> None:
    config = rl_fields(tmp_path, f"learns-{mode}-{seed}", mlflow_uri, engine_url) | {
        "seed": seed,
        "schedule": SCHEDULES[mode],
        "num_steps": 60,
        "eval_every": 0,
        "checkpoint_every": 60,
        "learning_rate": 1e-2,
        "lr_schedule": "constant",
        # Otherwise seed 0 converges to one letter and an end token.
        "objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.003}]},
    }
    config["environment"]["params"] |= {"letters": "a", "group_size": 16}
    rewards = curve(rl(RlConfig.model_validate(config)), "env/all/reward/total")
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.9

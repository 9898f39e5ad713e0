"""Warnings about the usual failures of reinforcement learning, one injected fault at a time."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from healthy_metrics import HEALTHY
from tinker_cookbook.completers import TokensWithLogprobs

from flows.config.rl import RlConfig
from flows.rl import _health_limits
from tasks.rl.health import CONSTANT, LENGTH, REWARD, REWARD_SUM, HealthLimits, HealthWatch
from tasks.rl.trajectories import compute_completion_metrics

FAULTS: dict[str, tuple[dict[str, float], str]] = {
    "entropy": (
        {"optim/entropy": 0.1},
        r"below 10% of its first values \(now 0.1\) .* add the regularizer negative_entropy",
    ),
    "mismatch": ({"mismatch/kl_k3": 0.3}, r"divergence of the trainer from the sampler .* above 0.1 \(0.3\)"),
    "truncated": ({"rollout/truncated": 0.8}, "truncated completions .* raise rollout.max_tokens"),
    "stale": ({"async/stale_share": 0.7}, "too old to train on .* raise schedule.max_steps_off_policy"),
    "failed": ({"rollout_errors/share_skipped": 0.5}, "failed in all attempts .* check the environment"),
    "logprobs": ({"rollout/logprob_error": 0.2}, "error of the logprobs of samples .* raise rollout.num_candidates"),
    "constant": ({"env/all/by_group/frac_all_bad": 0.7}, r"above 0.9 \(30% all right, 70% all wrong\)"),
    "slow": ({"time/environment": 3.9}, r"more than 90% of the time of rollouts \(3.9 s\)"),
    "length": ({LENGTH: 200.0, REWARD: 0.5}, "reward has risen while the length .* by a factor of 4"),
    "repetition": ({"rollout/repetition": 0.8, REWARD: 0.5}, r"more than 50% of the 4-grams .* \(80%\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_warns_once_when_it_lasts(fault):
    changes, message = FAULTS[fault]
    watch, warned = HealthWatch(HealthLimits()), []
    for step in range(20):
        if step == 12:  # a resumed run goes on
            state = json.loads(json.dumps(watch.state()))
            watch = HealthWatch(HealthLimits())
            watch.restore(state)
        warned += watch.observe(step, HEALTHY | (changes if step >= 10 else {}))
    (warning,) = warned
    assert (warning.check, warning.step) == (fault, 14)
    assert re.search(message, warning.text), warning.text
    assert "in 5 consecutive measurements, up to step 14; " in warning.text
    # A second warning only after the fault has ended and returned.
    for step in range(20, 30):
        warned += watch.observe(step, HEALTHY | (changes if step >= 22 else {}))
    assert [warning.step for warning in warned] == [14, 26]


def test_short_faults_and_longer_answers_without_a_higher_reward_do_not_warn():
    watch = HealthWatch(HealthLimits())
    for step in range(30):
        faults = {key: value for changes, _ in FAULTS.values() for key, value in changes.items()}
        assert not watch.observe(step, HEALTHY | (faults if step >= 6 and step % 5 else {}))
    assert not any(watch.observe(step, HEALTHY | {LENGTH: 500.0}) for step in range(30, 40))
    fast = {"time/rollout": 0.5, "time/environment": 0.49}
    assert not any(watch.observe(step, HEALTHY | fast) for step in range(40, 50)), "half a second is not slow"
    assert not any(watch.observe(step, {"loss/total": 1.0}) for step in range(50, 60))


def test_named_rewards_replace_the_total_of_the_environments():
    """The total is constant, but the weighted sum teaches; and the other way round."""
    healthy, teaching = HealthWatch(HealthLimits()), {"env/all/by_group/frac_all_bad": 1.0, CONSTANT: 0.0}
    assert not any(healthy.observe(step, HEALTHY | teaching) for step in range(20))
    useless = HealthWatch(HealthLimits())
    (warning,) = [warning for step in range(20) for warning in useless.observe(step, HEALTHY | {CONSTANT: 1.0})]
    assert "above 0.9 (100%, by the weighted sum of rewards)" in warning.text
    watch, warned = HealthWatch(HealthLimits()), []
    for step in range(20):
        warned += watch.observe(
            step, HEALTHY | {REWARD_SUM: 0.1 * step, "rollout/repetition": 0.8 if step > 9 else 0.0}
        )
    assert [warning.check for warning in warned] == ["repetition"]


def test_a_reward_that_falls_on_held_out_groups_while_it_rises_in_training_warns():
    def run(held_out: list[float]) -> list[Any]:
        watch, warned = HealthWatch(HealthLimits()), []
        for step in range(len(held_out) * 4):
            metrics = {REWARD: 0.01 * step}
            if step % 4 == 0:
                metrics[f"test/{REWARD}"] = held_out[step // 4]
            warned += watch.observe(step, metrics)
        return warned

    (warning,) = run([0.2, 0.4, 0.3, 0.2, 0.2])
    assert (warning.check, warning.step) == ("held_out", 12)
    assert "risen in training and fallen on the held-out groups (0.2) at 2 consecutive evaluations" in warning.text
    assert not run([0.2, 0.4, 0.3, 0.5, 0.4, 0.6])


def test_shares_of_completions():
    turns = [([1, 2, 3, 4, 5, 6], "stop"), ([7] * 8, "length"), ([1], "length"), ([], "stop")]
    transitions = [SimpleNamespace(ac=TokensWithLogprobs(tokens, None, cast(Any, reason))) for tokens, reason in turns]
    group = SimpleNamespace(trajectories_G=[SimpleNamespace(transitions=transitions)])
    metrics = compute_completion_metrics([cast(Any, group)])
    # The second has five 4-grams, four of them repeated.
    assert metrics == {"rollout/truncated": 0.5, "rollout/repetition": pytest.approx(0.8 / 4)}
    assert compute_completion_metrics([]) == {}


def test_bound_of_the_mismatch_depends_on_the_kind_of_model():
    """Ten times higher for mixtures of experts, as in the healthy runs that tinker-cookbook reports."""
    fields = {"run_name": "r", "environment": {"builder": "a:B"}}

    def limit(model: str, **fields_of_schedule: Any) -> float:
        config = RlConfig.model_validate(fields | {"model": model, "schedule": fields_of_schedule})
        assert config.health
        return _health_limits(config, config.health).mismatch_above

    dense, mixture = "Qwen/Qwen3-8B", "Qwen/Qwen3.6-35B-A3B"
    assert limit(mixture) == 10 * limit(dense) == 10 * limit("tiny")
    assert limit(dense, mode="async", groups_per_batch=2) == limit(dense, num_substeps=2) > limit(mixture)
    # The reported values: healthy runs stay silent, and the error that the check found does not.
    assert limit(dense) > 0.0002
    assert 0.011 < limit(mixture) < 0.09

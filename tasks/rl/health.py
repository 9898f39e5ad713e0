"""Watch for the usual failures of reinforcement learning in the metrics of consecutive steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from tinker_cookbook.model_info import get_model_attributes

from tasks.training.batch_source import MetricWarning

REWARD = "env/all/reward/total"
# With named rewards: mean of their weighted sum, and share of the groups in which it gives no advantage.
REWARD_SUM = "rewards/sum"
CONSTANT = "rewards/constant"
LENGTH = "env/all/ac_tokens_per_turn"
# Divergence of the trainer from the sampler in nats per token, beyond which something is wrong. Healthy runs have
# 0.0002 with dense models and 0.001 to 0.002 with mixtures of experts; a faulty run had 0.09 (README of
# tinker-cookbook's recipe rl_numerics_check). Samples of older weights also differ by the updates in between.
_MISMATCH_OF_DENSE, _MISMATCH_OF_MIXTURES, _MISMATCH_OF_OLDER = 0.005, 0.05, 0.1
# Evaluations in a row at which the reward rises in training and falls on held-out groups.
_NUM_DIVERGED = 2
# Environments count as slow only if they also take more than this many seconds.
_MIN_ENVIRONMENT_S = 1.0


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Limits of the metrics of a healthy run.

    Attributes:
        patience: consecutive steps beyond a limit until a warning; also the steps at the start that later steps are
            compared with.
        entropy_below: entropy, relative to that of the start.
        mismatch_above: `mismatch/kl_k3`, nats per token.
        truncated_above: share of completions that reached the token limit.
        constant_above: share of groups whose members all have the same reward.
        length_factor: length of completions relative to that of the start, or its inverse, while the reward rises.
        repetition_above: share of repeated 4-grams of tokens, while the reward rises.
        stale_above: share of sampled groups that were too old to train on.
        skipped_above: share of groups whose environments failed in all attempts.
        environment_above: share of the rollout's time that environments take.
        logprob_error_above: `rollout/logprob_error`, nats.
        hang_seconds, hang_factor: see `HangWatch`.
    """

    patience: int = 5
    entropy_below: float = 0.1
    mismatch_above: float = _MISMATCH_OF_OLDER
    truncated_above: float = 0.5
    constant_above: float = 0.9
    length_factor: float = 3.0
    repetition_above: float = 0.5
    stale_above: float = 0.5
    skipped_above: float = 0.1
    environment_above: float = 0.9
    logprob_error_above: float = 0.05
    hang_seconds: float = 60.0
    hang_factor: float = 10.0


def is_mixture(model: str) -> bool:
    """Return whether a model is a mixture of experts, by its size such as `35B-A3B`; False for unknown models.

    >>> is_mixture("Qwen/Qwen3.6-35B-A3B"), is_mixture("Qwen/Qwen3-8B"), is_mixture("tiny")
    (True, False, False)
    """
    try:
        return "-A" in get_model_attributes(model).size_str
    except (KeyError, ValueError):
        return False


def mismatch_limit(model: str, *, on_policy: bool) -> float:
    """Return the default of `HealthLimits.mismatch_above`, nats per token.

    Args:
        on_policy: True if each batch is sampled from the weights that it updates.
    """
    if not on_policy:
        return _MISMATCH_OF_OLDER
    return _MISMATCH_OF_MIXTURES if is_mixture(model) else _MISMATCH_OF_DENSE


class _Check(NamedTuple):
    name: str
    figure: float
    is_bad: bool
    problem: str
    fix: str


class HealthWatch:
    """Checks of the metrics of consecutive steps.

    A failure causes one warning, once it has lasted for `HealthLimits.patience` steps. After it has ended, it can cause
    another one.
    """

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._first: dict[str, list[float]] = {}
        self._durations: dict[str, int] = {}
        # Mean reward of the training steps before each evaluation, and the reward of the evaluation.
        self._evaluations: list[tuple[float, float]] = []
        self._rewards: list[float] = []

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[MetricWarning]:
        """Check the metrics of a step; return the failures that have just lasted long enough."""
        for key in ("optim/entropy", LENGTH, REWARD, REWARD_SUM):
            if key in metrics and len(self._first.setdefault(key, [])) < self._limits.patience:
                self._first[key].append(metrics[key])
        warnings: list[MetricWarning] = []
        for check in self._checks(metrics):
            self._durations[check.name] = self._durations.get(check.name, 0) + 1 if check.is_bad else 0
            if self._durations[check.name] == self._limits.patience:
                duration = f"in {self._limits.patience} consecutive measurements, up to step {step}"
                text = f"{check.problem} {duration}; {check.fix}."
                warnings.append(MetricWarning(check.name, step, check.figure, text))
        warnings += self._compare_evaluations(step, metrics)
        if REWARD in metrics:
            self._rewards.append(metrics[REWARD])
        return warnings

    def state(self) -> dict[str, Any]:
        """Return the state for resuming a run, as JSON data."""
        return {
            "first": {key: list(values) for key, values in self._first.items()},
            "durations": dict(self._durations),
            "evaluations": [list(pair) for pair in self._evaluations],
            "rewards": list(self._rewards),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an empty state resets."""
        self._first = {key: list(values) for key, values in state.get("first", {}).items()}
        self._durations = dict(state.get("durations", {}))
        self._evaluations = [(train, test) for train, test in state.get("evaluations", ())]
        self._rewards = list(state.get("rewards", ()))

    def _checks(self, metrics: Mapping[str, float]) -> Iterator[_Check]:
        """Check each metric that the step has."""
        limits = self._limits
        entropy = metrics.get("optim/entropy")
        if entropy is not None and self._is_started("optim/entropy"):
            bound = limits.entropy_below * fmean(self._first["optim/entropy"])
            share = f"{limits.entropy_below:.0%} of its first values"
            problem = f"The entropy of samples has been below {share} (now {entropy:.3g})"
            fix = "lower the learning rate, or add the regularizer negative_entropy or kl or raise its weight"
            yield _Check("entropy", entropy, entropy < bound, problem, fix)
        for name, key, limit, subject, fix in (
            (
                "mismatch",
                "mismatch/kl_k3",
                limits.mismatch_above,
                "The divergence of the trainer from the sampler",
                "lower the learning rate or (mode async) schedule.max_steps_off_policy, or set a stricter correction",
            ),
            (
                "truncated",
                "rollout/truncated",
                limits.truncated_above,
                "The share of truncated completions",
                "raise rollout.max_tokens, or reward shorter answers",
            ),
            (
                "stale",
                "async/stale_share",
                limits.stale_above,
                "The share of groups that were too old to train on",
                "raise schedule.max_steps_off_policy, or use more groups per step",
            ),
            (
                "failed",
                "rollout_errors/share_skipped",
                limits.skipped_above,
                "The share of groups that failed in all attempts",
                "check the environment, raise rollout.timeout_s, or accept smaller groups by rollout.min_successful",
            ),
            (
                "logprobs",
                "rollout/logprob_error",
                limits.logprob_error_above,
                "The error of the logprobs of samples",
                "raise rollout.num_candidates in the next run",
            ),
        ):
            figure = metrics.get(key)
            if figure is not None:
                yield _Check(name, figure, figure > limit, f"{subject} has been above {limit:g} ({figure:.3g})", fix)
        yield from self._check_groups(metrics)
        yield from self._check_environment(metrics)
        yield from self._check_hacking(metrics)

    def _check_groups(self, metrics: Mapping[str, float]) -> Iterator[_Check]:
        good, bad = (metrics.get(f"env/all/by_group/frac_all_{key}") for key in ("good", "bad"))
        limit = self._limits.constant_above
        if CONSTANT in metrics:
            share = metrics[CONSTANT]
            shares = f"{share:.0%}, by the weighted sum of rewards"
        elif good is not None and bad is not None:
            share = good + bad
            shares = f"{good:.0%} all right, {bad:.0%} all wrong"
        else:
            return
        problem = f"The share of groups with one reward for all members has been above {limit:g} ({shares})"
        yield _Check(
            "constant",
            share,
            share > limit,
            problem,
            "they teach nothing: use problems of another difficulty, or larger groups",
        )

    def _check_environment(self, metrics: Mapping[str, float]) -> Iterator[_Check]:
        if "time/environment" not in metrics or not metrics.get("time/rollout"):
            return
        seconds, limit = metrics["time/environment"], self._limits.environment_above
        share = seconds / metrics["time/rollout"]
        problem = f"Environments have taken more than {limit:.0%} of the time of rollouts ({seconds:.1f} s)"
        is_slow = share > limit and seconds > _MIN_ENVIRONMENT_S
        yield _Check("slow", share, is_slow, problem, "make them faster, or set rollout.timeout_s")

    def _check_hacking(self, metrics: Mapping[str, float]) -> Iterator[_Check]:
        """Check for signs of reward hacking: a reward that rises without better answers."""
        reward = REWARD_SUM if REWARD_SUM in metrics else REWARD
        if reward not in metrics or not self._is_started(reward):
            return
        rises = metrics[reward] > fmean(self._first[reward])
        fix = "read the transcripts, and reward what the answers lack"
        if LENGTH in metrics and self._is_started(LENGTH):
            ratio = metrics[LENGTH] / max(fmean(self._first[LENGTH]), 1e-9)
            factor = self._limits.length_factor
            problem = f"The reward has risen while the length of completions changed by a factor of {ratio:.2g}"
            yield _Check("length", ratio, rises and not 1 / factor <= ratio <= factor, problem, fix)
        repetition = metrics.get("rollout/repetition")
        if repetition is not None:
            limit = self._limits.repetition_above
            problem = f"The reward has risen while more than {limit:.0%} of the 4-grams of completions were repeated"
            yield _Check("repetition", repetition, rises and repetition > limit, f"{problem} ({repetition:.0%})", fix)

    def _compare_evaluations(self, step: int, metrics: Mapping[str, float]) -> list[MetricWarning]:
        """Warn if the reward rises in training and falls on the held-out groups, at several evaluations in a row."""
        held_out = metrics.get(f"test/{REWARD}")
        if held_out is None:
            return []
        if self._rewards:
            self._evaluations = [*self._evaluations[-_NUM_DIVERGED:], (fmean(self._rewards), held_out)]
            self._rewards = []
        pairs = list(zip(self._evaluations, self._evaluations[1:], strict=False))
        if len(pairs) < _NUM_DIVERGED or not all(b[0] > a[0] and b[1] < a[1] for a, b in pairs):
            return []
        self._evaluations = self._evaluations[-1:]
        text = (
            f"The reward has risen in training and fallen on the held-out groups ({held_out:.3g}) at {_NUM_DIVERGED} "
            f"consecutive evaluations, up to step {step}; use the best checkpoint (keep_best), or more problems."
        )
        return [MetricWarning("held_out", step, held_out, text)]

    def _is_started(self, key: str) -> bool:
        return len(self._first.get(key, ())) >= self._limits.patience

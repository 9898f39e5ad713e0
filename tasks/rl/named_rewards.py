"""Named rewards: a weighted sum of rewards that the environments report under a name.

A named reward is a metric that an environment reports: the sum of the metric over the turns of a trajectory, plus the
metric of the same name from the group's rewards. `total` is the environment's own total reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import fsum
from statistics import fmean
from threading import Lock
from typing import Any, Literal

import torch
from tinker_cookbook.rl.types import Metrics, TrajectoryGroup
from torch import Tensor

from objectives.gradients.diagnostics import compare_gradients, scalar_products
from objectives.term_weights.schedule import Constant, WeightSchedule
from objectives.term_weights.targets import Targets, TargetSpec
from tasks.rl.advantages import (
    ROUNDING,
    AdvantageSettings,
    TokenAdvantages,
    compute_token_advantages,
    has_no_advantages,
)
from tasks.rl.rollouts.group_rollout import Group
from tasks.training.tracking.metric_names import safe_name

# Name of the environment's own total reward.
TOTAL = "total"
# Added to a standard deviation before a division by it.
_LEAST_SPREAD = 1e-4

Normalization = Literal["sum", "decoupled"]


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Weight of a named reward.

    Attributes:
        weight: number or schedule; ignored if there is a target.
        target: limit of the mean reward, from which a controller finds the weight.
    """

    weight: float | WeightSchedule = 1.0
    target: TargetSpec | None = None

    def weight_at(self, step: int, num_steps: int) -> float:
        schedule = self.weight if isinstance(self.weight, WeightSchedule) else Constant(value=self.weight)
        return schedule.weight_at(step, num_steps)


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weights of the named rewards at a step, and how the rewards are added up.

    Attributes:
        weights: weight by name.
        normalization: ``"sum"``: the advantages are those of the weighted sum of the rewards. ``"decoupled"``: each
            reward is normalized within its group before the weighted sum.
    """

    weights: Mapping[str, float]
    normalization: Normalization


def combine_advantages(
    groups: Sequence[TrajectoryGroup], settings: AdvantageSettings, mix: RewardWeights
) -> TokenAdvantages:
    """Compute the advantage of each sampled token from the named rewards.

    ``"decoupled"`` is GDPO: the advantage of reward k is ``(r_k - mean) / (deviation + 1e-4)`` within its group, and
    the weighted sum of these advantages is normalized alike over the trajectories of all groups. Deviations divide by
    ``n - 1``. A batch in which all sums are equal, up to rounding, has advantages of 0.

    Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization" (arXiv:2601.05242),
    section 3.1. The weights enter after the group's normalization.
    """
    weighted = weighted_groups(groups, mix)
    totals = compute_token_advantages(weighted, settings)
    if mix.normalization == "sum":
        return totals
    sums_T = torch.stack(list(reward_parts(groups, settings, mix).values())).sum(0)
    lengths = torch.tensor(
        [sum(len(turn.ac.tokens) for turn in member.transitions) for group in groups for member in group.trajectories_G]
    )
    ends = lengths.cumsum(0)[lengths > 0]
    sums_D = sums_T[ends - 1]  # all tokens of a trajectory have the same advantage
    spread = sums_D.std(correction=1) if len(sums_D) > 1 else torch.zeros(())
    if spread <= ROUNDING * sum(map(abs, mix.weights.values())):
        return replace(totals, advantages_T=torch.zeros_like(sums_T))
    return replace(totals, advantages_T=(sums_T - sums_D.mean()) / (spread + _LEAST_SPREAD))


def weighted_groups(groups: Sequence[TrajectoryGroup], mix: RewardWeights) -> list[TrajectoryGroup]:
    """Return groups whose rewards are the weighted sums of the named ones."""
    return [_weighted(group, mix.weights) for group in groups]


def reward_parts(
    groups: Sequence[TrajectoryGroup], settings: AdvantageSettings, mix: RewardWeights
) -> dict[str, Tensor]:
    """Return each reward's weighted part of the advantages by name, ``(T,)``.

    The last step of the advantages is left out: the division by the standard deviation of the sum, within the group
    with `scale` and over the batch with ``"decoupled"``.
    """
    alone = replace(settings, scale=mix.normalization == "decoupled")
    return {
        name: weight * compute_token_advantages([_weighted(group, {name: 1.0}) for group in groups], alone).advantages_T
        for name, weight in mix.weights.items()
    }


def is_constant(group: TrajectoryGroup, mix: RewardWeights, settings: AdvantageSettings) -> bool:
    """Check whether the rewards of a group give all its members the same advantage."""
    sums = [mix.weights]
    if mix.normalization == "decoupled":
        sums = [{name: 1.0} for name, weight in mix.weights.items() if weight]
    return all(has_no_advantages(_weighted(group, weights), settings) for weights in sums)


def reported_names(groups: Sequence[TrajectoryGroup]) -> set[str]:
    """Return the names of the rewards that the trajectories of groups report."""
    reported = {TOTAL}
    for group in groups:
        for metrics in group.metrics_G:
            reported |= metrics.keys()
        for trajectory in group.trajectories_G:
            for turn in trajectory.transitions:
                reported |= turn.metrics.keys()
    return reported


def _weighted(group: TrajectoryGroup, weights: Mapping[str, float]) -> TrajectoryGroup:
    """Group whose rewards are the weighted sums of the named ones, at the same turns; a missing metric counts 0."""

    def reward(metrics: Metrics, own: float) -> float:
        return fsum(weight * (own if name == TOTAL else metrics.get(name, 0.0)) for name, weight in weights.items())

    trajectories = [
        replace(
            trajectory,
            transitions=[replace(turn, reward=reward(turn.metrics, turn.reward)) for turn in trajectory.transitions],
        )
        for trajectory in group.trajectories_G
    ]
    pairs = zip(group.metrics_G, group.final_rewards_G, strict=True)
    return TrajectoryGroup(trajectories, [reward(metrics, own) for metrics, own in pairs], group.metrics_G)


class NamedRewards:
    """Weights of the named rewards over a run, and their metrics.

    The weight of a target at a step depends on the rewards of all earlier steps, whose groups are complete when the
    step starts.

    Attributes:
        current: weights of the newest step, once one has started.
    """

    current: RewardWeights

    def __init__(self, specs: Mapping[str, RewardSpec], normalization: Normalization) -> None:
        self._specs = specs
        self._normalization: Normalization = normalization
        self._targets = Targets({name: spec.target for name, spec in specs.items() if spec.target})
        self._num_steps = 0
        self._reported: set[str] = set()
        self._is_checked = False
        self._lock = Lock()  # minibatches are gathered in threads
        # By step: rewards by name of each minibatch, until `_observe` passes them to the targets; weights and metrics,
        # until `metrics` returns them; state of the newest step.
        self._values: dict[int, list[Mapping[str, Sequence[float]]]] = {}
        self._weights: dict[int, RewardWeights] = {}
        self._observed: dict[int, dict[str, float]] = {}
        self._states: dict[int, dict[str, Any]] = {}

    @property
    def targets(self) -> dict[str, TargetSpec]:
        """Targets of the rewards by ``reward/<name>``, the prefix of their metrics."""
        return {safe_name(f"reward/{name}"): target for name, target in self._targets.specs.items()}

    def begin(self, num_steps: int, state: Mapping[str, Any]) -> None:
        """Prepare for a new or resumed run."""
        self._num_steps = num_steps
        self._targets.restore(state.get("targets", {}))
        self._reported = set(state.get("reported", ()))

    def start(self, step: int) -> None:
        """Set the weights of a step from the rewards of all earlier steps."""
        self._observe(step)
        weights = {
            # The multiplier of a target is the weight of a minimized value. + 0.0 turns -0.0 into 0.0.
            name: -self._targets.weight_of(name) + 0.0 if spec.target else spec.weight_at(step, self._num_steps)
            for name, spec in self._specs.items()
        }
        self._weights[step] = self.current = RewardWeights(weights, self._normalization)
        self._states = {step: self._state()}

    def weights_at(self, step: int) -> RewardWeights:
        """Return the weights of a step that has started and whose metrics are not computed yet."""
        return self._weights[step]

    def record(self, step: int, groups: Sequence[Group]) -> RewardWeights:
        """Record the rewards of a minibatch, and return the weights of its step."""
        self.add(step, groups)
        return self._weights[step]

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Record the rewards of groups that a step has sampled, whether or not it trains on them."""
        completed = [group.trajectories for group in groups if group.trajectories is not None]
        values = {
            name: [reward for group in completed for reward in _weighted(group, {name: 1.0}).get_total_rewards()]
            for name in self._specs
        }
        with self._lock:
            if completed:
                self._reported |= reported_names(completed)
            self._values.setdefault(step, []).append(values)

    def skip(self, step: int) -> None:
        """Forget the rewards of a step whose update is skipped: the targets do not observe them."""
        with self._lock:
            self._values.pop(step, None)
            self._weights.pop(step, None)

    def pop_warnings(self) -> dict[str, str]:
        """Return a warning by name for each reward that no completion has reported by the end of the first step.

        The name may be misspelled, or the metric may be one that few completions report. Later calls return nothing.
        """
        with self._lock:
            if self._is_checked or not self._reported:
                return {}
            self._is_checked = True
            reported = ", ".join(sorted(self._reported))
            return {
                name: f"The field rewards names {name!r}, which no completion has reported so far: it counts 0 until "
                f"one does. If it is misspelled, use one of {reported}."
                for name in self._specs
                if name not in self._reported
            }

    def metrics(
        self, step: int, minibatches: Sequence[Sequence[Group]], settings: AdvantageSettings
    ) -> dict[str, float]:
        """Return ``reward/<name>/...`` of a step, and ``rewards/sum`` and ``rewards/constant`` of the weighted sums.

        ``rewards/sum`` is the mean weighted sum of a completion, and ``rewards/constant`` the share of groups whose
        members all have the same advantage. ``value`` is the mean reward, ``weight`` the weight of the step. A target
        also has ``multiplier``, ``violation`` and ``at_bound``. A reward's advantages are a vector with one entry per
        sampled token: up to sign and scale, the gradient of the policy loss with respect to the logprobs of the
        samples, as long as the policy is the one that sampled them. ``share`` compares the norms of the weighted
        vectors, and the cosines the directions of the vectors without their weights.
        """
        self._observe(step + 1)
        mix, names = self._weights.pop(step), list(self._specs)
        metrics = self._observed.pop(step)
        metrics |= {f"reward/{name}/weight": weight for name, weight in mix.weights.items()}
        rewarded = [group.trajectories for groups in minibatches for group in groups if group.trajectories is not None]
        if rewarded:
            sums = [reward for group in rewarded for reward in _weighted(group, mix.weights).get_total_rewards()]
            metrics["rewards/sum"] = fsum(sums) / len(sums)
            metrics["rewards/constant"] = fmean(is_constant(group, mix, settings) for group in rewarded)
        unweighted = RewardWeights(dict.fromkeys(names, 1.0), self._normalization)
        products_KK = torch.zeros((len(names), len(names)), dtype=torch.float64)
        for groups in minibatches:
            completed = [group.trajectories for group in groups if group.trajectories is not None]
            if completed:
                parts = reward_parts(completed, settings, unweighted)
                products_KK += scalar_products(torch.stack([parts[name] for name in names]).double())
        weights_K = torch.tensor([mix.weights[name] for name in names], dtype=torch.float64)
        stats = compare_gradients(products_KK, weights_K.abs() * products_KK.diagonal().sqrt())
        shares = zip(names, stats.shares_K.tolist(), strict=True)
        metrics |= {f"reward/{name}/share": share for name, share in shares}
        for (a, first), (b, second) in combinations(enumerate(names), 2):
            metrics[f"reward/cosine/{first}/{second}"] = stats.cosines_KK[a, b].item()
        return {safe_name(key): value for key, value in metrics.items()}

    def state(self, step: int) -> dict[str, Any]:
        """Return the state before a step as JSON data."""
        if step in self._states:
            return self._states[step]
        self._observe(step)
        return self._state()

    def _state(self) -> dict[str, Any]:
        with self._lock:
            return {"targets": dict(self._targets.state()), "reported": sorted(self._reported & self._specs.keys())}

    def _observe(self, before: int) -> None:
        """Pass the rewards of all steps before ``before`` to the controllers of the targets, each step once."""
        with self._lock:
            for step in sorted(step for step in self._values if step < before):
                values = self._values.pop(step)
                means = {f"term/{name}/value": _mean(values, name) for name in self._specs}
                figures = means | self._targets.observe(step, means)  # `Targets` names metrics term/<name>/...
                self._observed[step] = {key.replace("term/", "reward/", 1): value for key, value in figures.items()}


def _mean(values: Sequence[Mapping[str, Sequence[float]]], name: str) -> float:
    """Mean over all trajectories, independent of the order in which minibatches complete."""
    rewards = [reward for minibatch in values for reward in minibatch[name]]
    return fsum(rewards) / len(rewards) if rewards else float("nan")

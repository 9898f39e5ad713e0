"""Named rewards: advantages against numpy on the same groups, weights, and the figures of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from mlflow.utils.validation import _validate_metric
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from objectives.term_weights.schedule import Linear
from objectives.term_weights.targets import TargetController, TargetSpec
from tasks.rl.advantages import AdvantageSettings, compute_token_advantages
from tasks.rl.named_rewards import NamedRewards, RewardSpec, RewardWeights, combine_advantages, is_constant
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import compute_group_metrics

PROMPT = types.ModelInput.from_ints([5])

# Rewards of two groups of three: `correct` and `format` of two turns each, and `length` of the group. The environment's
# own rewards are 10 per turn and 7 per member; the tokens of the turns are 2 and 1.
CORRECT = np.array([[[0, 1], [0, 0], [1, 1]], [[0, 0], [1, 0], [0, 0]]], dtype=float)
FORMAT = np.array([[[1, 0], [0, 0], [0, 0]], [[0, 1], [1, 1], [0, 1]]], dtype=float)
LENGTH = np.array([[30.0, 10.0, 20.0], [5.0, 5.0, 5.0]])
NUM_TOKENS = (2, 1)


def turn(group: int, member: int, index: int) -> Transition:
    metrics: dict[str, float | int] = {
        "correct": CORRECT[group, member, index],
        "format": FORMAT[group, member, index],
        "unused": 3.0,
    }
    tokens = TokensWithLogprobs([7] * NUM_TOKENS[index], [-1.0] * NUM_TOKENS[index])
    return Transition(PROMPT, tokens, 10.0, index == 1, metrics)


def groups() -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            [Trajectory([turn(group, member, index) for index in range(2)], PROMPT) for member in range(3)],
            [7.0] * 3,
            [{"length": LENGTH[group, member]} for member in range(3)],
        )
        for group in range(2)
    ]


TOTALS = {"correct": CORRECT.sum(2), "format": FORMAT.sum(2), "length": LENGTH, "total": np.full((2, 3), 27.0)}
WEIGHTS = {"correct": 1.0, "format": 0.5, "length": 0.1, "total": 4.0}


def per_token(advantages: np.ndarray) -> list[float]:
    return np.repeat(advantages.reshape(-1), sum(NUM_TOKENS)).tolist()


def combine(normalization: str, **settings: object) -> list[float]:
    mix = RewardWeights(WEIGHTS, normalization)  # pyright: ignore[reportArgumentType]
    return combine_advantages(groups(), AdvantageSettings(**settings), mix).advantages_T.tolist()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("scale", [False, True])
def test_a_sum_is_the_advantage_of_the_weighted_rewards(scale: bool) -> None:
    reward = np.sum([weight * TOTALS[name] for name, weight in WEIGHTS.items()], axis=0)
    expected = reward - reward.mean(1, keepdims=True)
    if scale:
        expected = expected / (reward.std(1, ddof=1, keepdims=True) + 1e-4)
    assert combine("sum", scale=scale) == pytest.approx(per_token(expected), abs=1e-5)


def test_discounted_returns_keep_rewards_at_their_turns() -> None:
    """With a discount of 1/2, a reward at the last of three tokens is worth 1/4 at the first."""
    turns = WEIGHTS["correct"] * CORRECT + WEIGHTS["format"] * FORMAT + WEIGHTS["total"] * 10
    final = WEIGHTS["length"] * LENGTH + WEIGHTS["total"] * 7
    at_token = np.stack([np.zeros((2, 3)), turns[..., 0], turns[..., 1] + final], axis=-1)
    returns = np.stack(
        [
            at_token[..., 0] + at_token[..., 1] / 2 + at_token[..., 2] / 4,
            at_token[..., 1] + at_token[..., 2] / 2,
            at_token[..., 2],
        ],
        axis=-1,
    )
    expected = returns - returns[..., 0].mean(1)[:, None, None]
    assert combine("sum", estimator="discounted", discount=0.5) == pytest.approx(
        expected.reshape(-1).tolist(), abs=1e-4
    )


def test_decoupled_is_gdpo() -> None:
    """Each reward is normalized within its group, the weighted sum over the batch; then equal rewards say nothing."""

    def normalized(rewards: np.ndarray) -> np.ndarray:
        return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)

    total = np.sum([weight * normalized(TOTALS[name]) for name, weight in WEIGHTS.items()], axis=0)
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    assert combine("decoupled") == pytest.approx(per_token(expected), abs=1e-5)
    # The size of a reward does not matter, unlike in a sum.
    mix = RewardWeights({"correct": 1.0, "length": 1.0}, "decoupled")
    parts = [normalized(TOTALS["correct"]) + normalized(TOTALS["length"])]
    expected = (parts[0] - parts[0].mean()) / (parts[0].std(ddof=1) + 1e-4)
    assert combine_advantages(groups(), AdvantageSettings(), mix).advantages_T.tolist() == pytest.approx(
        per_token(expected), abs=1e-5
    )


def rewarded(*rewards: Mapping[str, float]) -> TrajectoryGroup:
    """Group whose members get named rewards at their end, of which `total` is the environment's own."""
    members = [
        Trajectory([Transition(PROMPT, TokensWithLogprobs([7], [-1.0]), 0.0, True, {})], PROMPT) for _ in rewards
    ]
    return TrajectoryGroup(members, [named.get("total", 0.0) for named in rewards], [dict(named) for named in rewards])


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "per_turn", "discounted", "gae"])
def test_equal_rewards_have_no_advantages_not_even_rounding(estimator: str) -> None:
    constant = [rewarded(*[{"total": reward}] * 8) for reward in (0.1, -0.1, 0.3, 0.7)]
    assert not compute_token_advantages(constant, AdvantageSettings(estimator=estimator)).advantages_T.any()


def test_decoupled_rewards_that_cancel_have_no_advantages() -> None:
    """Without rounding, the normalized sum of each group is 0."""
    mix = RewardWeights({"a": 1.0, "b": 1.0}, "decoupled")
    constant = [rewarded(*[{"a": reward, "b": 0.3}] * 8) for reward in (0.1, 0.5, 0.9)]
    opposed = [rewarded(*[{"a": a, "b": -a} for a in (0.1, 0.2, 0.4, 0.9)])]
    for groups in (constant, opposed):
        assert not combine_advantages(groups, AdvantageSettings(), mix).advantages_T.any()


def test_the_total_alone_changes_nothing() -> None:
    mix = RewardWeights({"total": 1.0}, "sum")
    for estimator in ("group_mean", "leave_one_out", "per_turn", "discounted", "gae"):
        settings = AdvantageSettings(estimator=estimator)
        mixed, plain = combine_advantages(groups(), settings, mix), compute_token_advantages(groups(), settings)
        for field in ("advantages_T", "values_T", "returns_T"):
            assert getattr(mixed, field).tolist() == getattr(plain, field).tolist()


def test_a_group_is_constant_by_the_rewards_that_count() -> None:
    first, second = groups()
    for weights, normalization, expected in (
        ({"length": 1.0}, "sum", (False, True)),
        ({"length": 0.0, "total": 1.0}, "sum", (True, True)),
        ({"length": 1.0, "correct": 1.0}, "decoupled", (False, False)),
        ({"length": 1.0, "correct": 0.0}, "decoupled", (False, True)),
    ):
        mix = RewardWeights(weights, normalization)  # pyright: ignore[reportArgumentType]
        settings = AdvantageSettings()
        assert (is_constant(first, mix, settings), is_constant(second, mix, settings)) == expected


def run_step(
    rewards: NamedRewards, step: int, minibatches: Sequence[Sequence[TrajectoryGroup]]
) -> tuple[Mapping[str, float], dict[str, float]]:
    """Weights and metrics of one step."""
    rewards.start(step)
    parts = [[Group((), group, ()) for group in minibatch] for minibatch in minibatches]
    mixes = [rewards.record(step, part) for part in parts]
    assert all(mix == mixes[0] for mix in mixes)
    return mixes[0].weights, rewards.metrics(step, parts, AdvantageSettings())


def test_the_figures_of_a_step() -> None:
    """Two minibatches; shares and cosines are those of the gradient, whose size at a token is the advantage."""
    specs = {"correct": RewardSpec(2.0), "length": RewardSpec(Linear(schedule="linear", start=0.0, end=1.0))}
    rewards = NamedRewards(specs, "sum")
    rewards.begin(5, {})
    run_step(rewards, 0, [groups()])
    weights, metrics = run_step(rewards, 1, [groups()[:1], groups()[1:]])
    assert weights == {"correct": 2.0, "length": 0.25}
    parts = {
        name: np.array(per_token(TOTALS[name] - TOTALS[name].mean(1, keepdims=True))) * weight
        for name, weight in weights.items()
    }
    norms = {name: np.linalg.norm(part) for name, part in parts.items()}
    assert metrics == pytest.approx(
        {
            "reward/correct/value": TOTALS["correct"].mean(),
            "reward/length/value": LENGTH.mean(),
            "reward/correct/weight": 2.0,
            "reward/length/weight": 0.25,
            "reward/correct/share": norms["correct"] / sum(norms.values()),
            "reward/length/share": norms["length"] / sum(norms.values()),
            "reward/cosine/correct/length": parts["correct"] @ parts["length"] / np.prod(list(norms.values())),
            "rewards/sum": (2.0 * TOTALS["correct"] + 0.25 * LENGTH).mean(),
            "rewards/constant": 0.0,
        }
    )


def test_a_target_raises_the_weight_of_a_reward_that_is_too_low() -> None:
    """The weight is the multiplier of a controller that saw the mean rewards of the steps before."""
    at_least, at_most = TargetSpec(at_least=2.0), TargetSpec(at_most=10.0)
    specs = {"correct": RewardSpec(target=at_least), "length": RewardSpec(target=at_most)}
    whole, controllers = NamedRewards(specs, "sum"), [TargetController(at_least), TargetController(at_most)]
    whole.begin(9, {})
    history = []
    for step in range(6):
        weights, metrics = run_step(whole, step, [groups()])
        history.append((weights, metrics))
        low, high = (controller.weight for controller in controllers)
        assert weights == {"correct": -low, "length": -high}
        figures = [controllers[0].observe(step, TOTALS["correct"].mean()), controllers[1].observe(step, LENGTH.mean())]
        assert metrics["reward/correct/multiplier"] == figures[0]["multiplier"]
        assert metrics["reward/length/violation"] == figures[1]["violation"]
    assert history[-1][0]["correct"] > 0 > history[-1][0]["length"]
    # A checkpoint before step 3 is taken when step 3 has started, or, at the end of a run, when it has not.
    for has_started in (True, False):
        first = NamedRewards(specs, "sum")
        first.begin(9, {})
        for step in range(3):
            run_step(first, step, [groups()])
        if has_started:
            first.start(3)
        state = json.loads(json.dumps(first.state(3)))
        resumed = NamedRewards(specs, "sum")
        resumed.begin(9, state)
        assert [run_step(resumed, step, [groups()]) for step in range(3, 6)] == history[3:]


def test_targets_do_not_observe_a_skipped_step() -> None:
    """A restarted run does not sample the groups of the step again."""
    specs = {"correct": RewardSpec(target=TargetSpec(at_least=2.0))}
    rewards, restarted = NamedRewards(specs, "sum"), NamedRewards(specs, "sum")
    for part in (rewards, restarted):
        part.begin(9, {})
        run_step(part, 0, [groups()])
    rewards.start(1)
    rewards.record(1, [Group((), group, ()) for group in groups()])
    rewards.skip(1)
    assert rewards.state(2)["targets"] == restarted.state(2)["targets"]
    assert run_step(rewards, 2, [groups()]) == run_step(restarted, 2, [groups()])


def test_a_reward_that_few_completions_report_counts_zero_until_then() -> None:
    """It is announced once, and not again in a resumed run that has seen it before."""
    specs = {"correct": RewardSpec(), "rare": RewardSpec(2.0)}
    rewards = NamedRewards(specs, "sum")
    rewards.begin(9, {})
    _, metrics = run_step(rewards, 0, [groups()])
    assert metrics["reward/rare/value"] == 0
    (warning,) = rewards.pop_warnings().items()
    assert warning[0] == "rare"
    assert warning[1].endswith("If it is misspelled, use one of correct, format, length, total, unused.")
    with_rare = groups()
    with_rare[0].metrics_G[0]["rare"] = 3.0
    _, metrics = run_step(rewards, 1, [with_rare])
    assert metrics["reward/rare/value"] == 3 / 6
    assert rewards.pop_warnings() == {}

    resumed = NamedRewards(specs, "sum")
    resumed.begin(9, json.loads(json.dumps(rewards.state(2))))
    run_step(resumed, 2, [groups()])
    assert resumed.pop_warnings() == {}


def test_metrics_have_names_that_mlflow_accepts() -> None:
    """A reward of an environment may have any name, such as `acc (%)`."""
    completed = [Group((f"tag@{number}",), group, ()) for number, group in enumerate(groups(), start=1)]
    for group in completed:
        assert group.trajectories is not None
        for trajectory in group.trajectories.trajectories_G:
            trajectory.transitions[0].metrics["acc (%)"] = 1.0
    rewards = NamedRewards({"acc (%)": RewardSpec()}, "sum")
    rewards.begin(9, {})
    rewards.start(0)
    rewards.record(0, completed)
    metrics = compute_group_metrics(completed) | rewards.metrics(0, [completed], AdvantageSettings())
    assert metrics["env/all/acc -x28--x25--x29-"] == 1.0
    assert "env/tag-x40-1/reward/total" in metrics
    for name in metrics:
        _validate_metric(name, 1.0, 0, 0)

"""Hooks and completers of users in the rollout of a group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tinker import types
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import RolloutState
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Action, ActionExtra, Env, StepResult, Trajectory, TrajectoryGroup

from blocks.errors import ConfigError
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.custom_completer import CompleterSpec, check_completion
from tasks.rl.rollouts.hooks import HookAction, HookSpec, action_shares
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution

PROMPT = types.ModelInput.from_ints([5, 6, 7])


@dataclass
class ThreeTurns(Env):
    """Environment of three turns with a reward of 1 each."""

    turns: int = 0
    rollout_limits: RolloutLimits | None = None

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return PROMPT, []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.turns += 1
        following = types.ModelInput.from_ints([*PROMPT.to_ints(), *action, 9])
        return StepResult(1.0, self.turns == 3, following, [], metrics={"turn": self.turns})


class Counter(TokenCompleter):
    """Policy whose completion of turn n is n tokens."""

    def __init__(self) -> None:
        self.turns = 0

    async def __call__(
        self, model_input: types.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.turns += 1
        return TokensWithLogprobs([40 + self.turns] * self.turns, [-0.5] * self.turns)


def roll_out(hook: HookSpec, env: Env | None = None) -> Trajectory:
    return asyncio.run(hook.run(Counter(), env or ThreeTurns()))


def spec(function: Any) -> HookSpec:
    return HookSpec("there:hook", function, is_class=False)


def test_silent_hook_changes_nothing_and_sees_each_turn() -> None:
    states: list[RolloutState] = []
    trajectory = roll_out(spec(states.append))
    plain = asyncio.run(do_single_rollout(Counter(), ThreeTurns()))
    assert trajectory == plain
    assert [state.turn_index for state in states] == [1, 2, 3]
    assert [state.sampled_tokens for state in states] == [1, 3, 6]
    assert [state.observation_tokens for state in states] == [5, 6, 7]
    assert [turn.ac.logprobs for turn in states[-1].transitions] == [[-0.5], [-0.5] * 2, [-0.5] * 3]
    assert states[-1].transitions[-1].episode_done
    assert not states[0].transitions[-1].episode_done


def test_rewards_and_stops_are_counted() -> None:
    def stop_at_two(state: RolloutState) -> list[HookAction]:
        actions = [HookAction("turn", reward=-0.1)]
        return [*actions, HookAction("two", reward=0.25, stop=True)] if state.turn_index == 2 else actions

    stopped = roll_out(spec(stop_at_two))
    assert [turn.reward for turn in stopped.transitions] == pytest.approx([0.9, 1.15])
    assert stopped.stop_reason == "two"
    assert stopped.transitions[-1].episode_done
    assert stopped.transitions[-1].metrics["stop/two"] == 1

    only_at_end = roll_out(spec(lambda state: HookAction("end", 2.0) if state.transitions[-1].episode_done else None))
    assert [turn.reward for turn in only_at_end.transitions] == [1, 1, 3]
    group = TrajectoryGroup([stopped, only_at_end], [0.0, 0.0], [{}, {}])
    assert action_shares([group]) == {
        "hook/end/rollouts": 0.5,
        "hook/end/stopped": 0.0,
        "hook/turn/rollouts": 0.5,
        "hook/turn/stopped": 0.0,
        "hook/two/rollouts": 0.5,
        "hook/two/stopped": 0.5,
    }


def test_class_combines_the_cookbooks_hooks_with_actions() -> None:
    calls: list[str] = []
    trajectory = roll_out(HookSpec.load("rollout_parts:Recording", {"calls": calls, "last_turn": 2}))
    assert calls == ["begin 0", "end 1", "begin 1", "end 2", "stop enough"]
    assert [turn.reward for turn in trajectory.transitions] == [1, 0.5]
    assert trajectory.stop_reason == "enough"


def test_a_stop_that_the_class_overrules_does_not_count() -> None:
    calls: list[str] = []
    trajectory = roll_out(HookSpec.load("rollout_parts:Continued", {"calls": calls, "last_turn": 1}))
    assert len(trajectory.transitions) > 1
    assert calls[:5] == ["begin 0", "[False]", "end 1", "begin 1", "[False, False]"]
    limit = ThreeTurns(rollout_limits=RolloutLimits(max_turns=1))
    limited = roll_out(HookSpec.load("rollout_parts:Continued", {"calls": [], "last_turn": 1}), limit)
    assert limited.stop_reason == "max_turns"
    for rollout in (trajectory, limited):
        shares = action_shares([TrajectoryGroup([rollout], [0.0], [{}])])
        assert shares == {"hook/enough/rollouts": 1.0, "hook/enough/stopped": 0.0}


def test_limits_of_the_environment_still_apply() -> None:
    limited = ThreeTurns(rollout_limits=RolloutLimits(max_turns=1))
    trajectory = roll_out(spec(lambda _: None), limited)
    assert len(trajectory.transitions) == 1
    assert trajectory.stop_reason == "max_turns"


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (3.0, "returned a float: return a tinker_flows.HookAction"),
        (["stop"], "returned a str: return a tinker_flows.HookAction"),
        (HookAction("a b"), "the name 'a b': use letters"),
        (HookAction("a", math.nan), "the reward nan: return a finite number"),
        ([HookAction("a"), HookAction("a")], "two actions of the same name"),
    ],
)
def test_invalid_actions(outcome: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roll_out(spec(lambda _: outcome))


class Scores:
    """Sampling client whose logprob of token t is -t / 50."""

    async def compute_logprobs(self, tokens: types.ModelInput) -> list[float | None]:
        return [None, *(-token / 50 for token in tokens.to_ints()[1:])]


def completions(attempt: int = 0, key: tuple[int, ...] = (0, 1, 2)) -> Sequence[Any]:
    custom = CompleterSpec.load("rollout_parts:OneOf", {"tokens": [10, 20, 30, 40]})
    members = SnapshotCompleter(cast(Any, Scores()), 8, SamplingDistribution(), key, custom=custom).members(attempt, 40)

    async def run() -> list[TokensWithLogprobs]:
        return list(await asyncio.gather(*(member(PROMPT, []) for member in members)))

    return [(completion.tokens, completion.logprobs) for completion in asyncio.run(run())]


def test_constrained_decoding_returns_the_logprobs_of_its_distribution() -> None:
    weights = {token: math.exp(-token / 50) for token in (10, 20, 30, 40)}
    drawn = completions()
    for (token,), (logprob,) in drawn:
        assert logprob == pytest.approx(math.log(weights[token] / sum(weights.values())))
    assert {token for (token,), _ in drawn} == set(weights)


def test_seeds_depend_on_member_attempt_and_group() -> None:
    assert completions() == completions()
    assert completions() != completions(attempt=1)
    assert completions() != completions(key=(0, 1, 3))


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (SimpleNamespace(tokens=[1]), "returned a SimpleNamespace: return a tinker_cookbook"),
        (TokensWithLogprobs([1, -1], [0.0, 0.0]), "returned the token -1, which is no token ID"),
        (TokensWithLogprobs([1], None), "no logprobs for 1 tokens"),
        (TokensWithLogprobs([1, 2], [-1.0]), "1 logprobs for 2 tokens"),
        (TokensWithLogprobs([1], [0.5]), "the logprob 0.5: return the natural logarithm"),
        (TokensWithLogprobs([1], [-math.inf]), "the logprob -inf"),
        (TokensWithLogprobs([1], [-1.0], cast(Any, "eos")), "the stop reason 'eos': return stop or length"),
    ],
)
def test_invalid_completions(completion: object, message: str) -> None:
    check_completion("there:Good", TokensWithLogprobs([1, 2], [-1.0, 0.0], "length"))
    with pytest.raises(ConfigError, match=message):
        check_completion("there:Bad", completion)


def test_completer_reaches_the_policy() -> None:
    assert CompleterSpec.load("rollout_parts:OneOf", {}).arguments == {"sampling_client", "seed"}
    cookbook = CompleterSpec.load("tinker_cookbook.completers:TinkerTokenCompleter", {"temperature": 0.5})
    assert cookbook.arguments == {"sampling_client", "max_tokens"}

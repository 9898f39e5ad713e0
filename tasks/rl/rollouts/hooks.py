"""Hooks of users that watch a rollout turn by turn: they may add rewards and end the episode."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, cast

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_runner import RolloutHooks, RolloutState, run_rollout, stop_reason_from_metrics
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    StepResult,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

from blocks.errors import ConfigError
from tasks.common.builders import import_builder

PREFIX = "hook/"

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LIMITS = (StopReason.MAX_TOKENS, StopReason.MAX_SAMPLED_TOKENS, StopReason.MAX_TURNS, StopReason.ROLLOUT_TIMEOUT)
_COOKBOOK_METHODS = ("on_turn_begin", "on_stop_reason", "on_grade", "on_artifacts")


@dataclass(frozen=True, slots=True)
class HookAction:
    """Action of a hook after a turn.

    Attributes:
        name: name of the action in the metrics.
        reward: reward added to the turn's.
        stop: True to end the episode. The name of the first such action becomes the stop reason of the episode, unless
            the environment has ended the episode or gives a reason.
    """

    name: str
    reward: float = 0.0
    stop: bool = False


HookResult = HookAction | list[HookAction] | tuple[HookAction, ...] | None
TurnFunction = Callable[[RolloutState], HookResult | Awaitable[HookResult]]


@dataclass(frozen=True, slots=True)
class HookSpec:
    """Import path of a hook and its parameters.

    A hook is a function of tinker-cookbook's `RolloutState` that is called after each turn, or a class with such a
    function as its method `on_turn_end`. Each rollout has an instance of the class. A class may also implement
    tinker-cookbook's `RolloutHooks`.

    Attributes:
        path: import path.
        target: the function or class with the parameters.
        is_class: True for a class.
    """

    path: str
    target: Callable[..., Any]
    is_class: bool

    @classmethod
    def load(cls, path: str, params: Mapping[str, Any]) -> HookSpec:
        """Import a hook.

        Raises:
            ConfigError: the hook cannot be imported, rejects the parameters, or lacks methods of a hook.
        """
        target = import_builder(path, "rollout.hook.builder", RolloutHooks)
        is_class = inspect.isclass(target)
        if not callable(target):
            raise ConfigError(f"rollout.hook.builder is {path!r}, which is no function or class: name one.")
        try:
            inspect.signature(target).bind(*([] if is_class else [None]), **params)
        except TypeError as error:
            raise ConfigError(
                f"rollout.hook.builder {path!r} does not take rollout.hook.params ({error}): a function takes the "
                "state of the rollout and the parameters, a class only the parameters."
            ) from error
        spec = cls(path, partial(target, **params), is_class)
        if is_class:
            methods = [name for name in _COOKBOOK_METHODS if hasattr(target, name)]
            if methods and len(methods) < len(_COOKBOOK_METHODS):
                raise ConfigError(
                    f"rollout.hook.builder {path!r} has only {', '.join(methods)} of tinker-cookbook's hooks: derive "
                    "it from tinker_cookbook.rl.rollout_runner.RolloutHooks."
                )
            if not methods and not hasattr(target, "on_turn_end"):
                raise ConfigError(
                    f"rollout.hook.builder {path!r} has no method of a hook: add on_turn_end, which gets the state of "
                    "the rollout."
                )
        return spec

    async def run(self, policy: TokenCompleter, env: Env) -> Trajectory:
        """Roll out one environment with the hook.

        Raises:
            ConfigError: the hook returned an invalid action.
        """
        instance = self.target() if self.is_class else None
        on_turn_end = getattr(instance, "on_turn_end", None) if self.is_class else self.target
        # `load` has checked that a class has all methods of tinker-cookbook's hooks or none.
        hooks = cast(RolloutHooks, instance) if hasattr(instance, _COOKBOOK_METHODS[0]) else None
        if on_turn_end is None:
            return await run_rollout(policy, env, hooks=hooks)
        recorder = _Recorder(policy)
        return await run_rollout(recorder, _HookedEnv(self.path, on_turn_end, recorder, env), hooks=hooks)


class _Recorder(TokenCompleter):
    """Completer that keeps the prompt and the completion of the newest turn."""

    def __init__(self, policy: TokenCompleter) -> None:
        self._policy = policy
        self.turn: tuple[tinker.ModelInput, TokensWithLogprobs] | None = None

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        completion = await self._policy(model_input, stop, **limit)
        self.turn = (model_input, completion)
        return completion


class _HookedEnv(Env):
    """Environment that calls a hook after each step and applies its actions."""

    def __init__(self, path: str, on_turn_end: TurnFunction, recorder: _Recorder, env: Env) -> None:
        self._path, self._on_turn_end, self._recorder, self._env = path, on_turn_end, recorder, env
        self._transitions: list[Transition] = []
        self._num_truncations = 0
        self._began = monotonic()

    def __getattr__(self, name: str) -> Any:
        # tinker-cookbook reads further attributes of an environment, such as limits and message injection.
        return getattr(self._env, name)

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        return await self._env.initial_observation()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        result = await self._env.step(action, extra=extra)
        assert self._recorder.turn is not None, "the policy has sampled before every step"
        prompt, completion = self._recorder.turn
        if self._transitions:  # the episode goes on, although the environment or a hook may have ended it
            self._transitions[-1] = replace(self._transitions[-1], episode_done=False)
        self._transitions.append(
            Transition(prompt, completion, result.reward, result.episode_done, result.metrics, result.logs)
        )
        if completion.stop_reason == "length" and not result.episode_done:
            self._num_truncations += 1
        state = RolloutState(
            turn_index=len(self._transitions),
            observation_tokens=result.next_observation.length,
            sampled_tokens=sum(len(turn.ac.tokens) for turn in self._transitions),
            num_length_truncations=self._num_truncations,
            elapsed_seconds=monotonic() - self._began,
            transitions=list(self._transitions),
        )
        outcome = self._on_turn_end(state)
        actions = _as_actions(self._path, await outcome if inspect.isawaitable(outcome) else outcome)
        result = _apply(result, actions)
        self._transitions[-1] = replace(
            self._transitions[-1], reward=result.reward, episode_done=result.episode_done, metrics=result.metrics
        )
        return result


def _as_actions(path: str, outcome: HookResult) -> list[HookAction]:
    actions = list(outcome) if isinstance(outcome, list | tuple) else [] if outcome is None else [outcome]
    for action in actions:
        if not isinstance(action, HookAction):
            raise ConfigError(
                f"The hook {path} returned a {type(action).__name__}: return a tinker_flows.HookAction, a list of them "
                "or None."
            )
        if not _NAME.fullmatch(action.name):
            raise ConfigError(
                f"The hook {path} returned an action with the name {action.name!r}: use letters, digits and _.-"
            )
        if not math.isfinite(action.reward):
            raise ConfigError(f"The hook {path} returned the reward {action.reward}: return a finite number.")
    if len({action.name for action in actions}) < len(actions):
        raise ConfigError(f"The hook {path} returned two actions of the same name: return one with the sum of rewards.")
    return actions


def _apply(result: StepResult, actions: Sequence[HookAction]) -> StepResult:
    """Add the rewards and metrics of all actions to the result of a step; end the episode if an action stops it.

    The first action that stops names the stop reason, unless the environment has ended the episode or gives a reason.
    """
    metrics = {**result.metrics, **{f"{PREFIX}{action.name}/reward": action.reward for action in actions}}
    stop = next((action for action in actions if action.stop), None)
    if stop and not result.episode_done:
        metrics |= {f"{PREFIX}{stop.name}/stops": 1.0}
        if stop_reason_from_metrics(metrics) is None:
            metrics |= {f"{STOP_METRIC_PREFIX}{stop.name}": 1.0}
    return replace(
        result,
        reward=result.reward + sum(action.reward for action in actions),
        episode_done=result.episode_done or stop is not None,
        metrics=metrics,
    )


def action_shares(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Share of rollouts in which each action of a hook occurred, and in which it ended the episode.

    An action that did not occur has no metrics. An action that stops may not have ended the episode, because the class
    of the hook has continued it (`on_stop_reason` of tinker-cookbook): in a turn before the last, or if a limit then
    ended the rollout.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories_G]
    rollouts = [
        {key for turn in trajectory.transitions for key in turn.metrics if key.startswith(PREFIX)}
        for trajectory in trajectories
    ]
    names = {key.removesuffix("/reward") for keys in rollouts for key in keys if key.endswith("/reward")}
    shares: dict[str, float] = {}
    for name in sorted(names):
        shares[f"{name}/rollouts"] = sum(f"{name}/reward" in keys for keys in rollouts) / len(rollouts)
        num_stopped = sum(
            f"{name}/stops" in trajectory.transitions[-1].metrics
            for trajectory in trajectories
            if trajectory.transitions and trajectory.stop_reason not in _LIMITS
        )
        shares[f"{name}/stopped"] = num_stopped / len(rollouts)
    return shares

"""Rollout of one group as one task: its environments share an event loop, are rewarded together and may share state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, SupportsFloat, TypeVar

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl.rollout_limits import TerminationRewardPolicy
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, RolloutError, Trajectory, TrajectoryGroup

from blocks.errors import ConfigError, TinkerFlowsError, UserCodeError
from objectives.errors import exit_call, place_in_user_code
from tasks.common.task import call, opaque_argument, retried_task
from tasks.preference.judges import record_verdicts
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.group_progress import GroupProgress, RolloutCancelledError
from tasks.rl.rollouts.hang_watch import HangWatch
from tasks.rl.rollouts.hooks import HookSpec
from tasks.rl.rollouts.truncation import OVERLONG, OverlongPenalty
from tasks.training.batch_source import SampledTokens

T = TypeVar("T")

# The service batches concurrent samples. More concurrent groups than this take memory without adding speed.
MAX_CONCURRENT_GROUPS = 256
# Errors of a user's environments and rewards. Ctrl-C interrupts the main thread, and rollouts run in others.
FAILURES = (Exception, SystemExit, KeyboardInterrupt)


@dataclass(frozen=True, slots=True)
class Group:
    """Result of a group's rollout.

    Attributes:
        tags: tags under which its metrics are logged: `logging_tags` of the builder.
        trajectories: trajectories in the order of the members; None if too few members succeeded.
        errors: errors of its environments and rewards in all attempts, and replies of judges without a verdict.
        text_labels_G: text labels of each trajectory, by name: the attribute ``text_labels`` of its environment.
        duration_s: duration of all attempts.
        sampled: tokens that the members have sampled in all attempts.
    """

    tags: tuple[str, ...]
    trajectories: TrajectoryGroup | None
    errors: tuple[RolloutError, ...]
    text_labels_G: tuple[Mapping[str, str], ...] = ()
    duration_s: float = field(default=0.0, compare=False)
    sampled: SampledTokens = field(default_factory=SampledTokens)


class RunningGroup(NamedTuple):
    """Group that is being rolled out.

    Attributes:
        pending: result of the rollout.
        progress: tokens sampled so far; its `cancel` ends the rollout.
    """

    pending: Future[Group]
    progress: GroupProgress


@dataclass
class RewardedGroup(EnvGroupBuilder):
    """Group whose rewards a strategy computes, so that an error of the rewards can be retried.

    Attributes:
        builder: builder of the group.
        number: index among the held-out groups; 0 for a group of a step.
        text_labels_G: text labels of each trajectory's environment, once the rewards are computed.
        cleanup_errors: errors of `cleanup`, which do not fail a group that has its rewards.
    """

    builder: EnvGroupBuilder
    number: int = 0
    text_labels_G: tuple[Mapping[str, str], ...] = field(default=(), init=False)
    cleanup_errors: list[RolloutError] = field(default_factory=list, init=False)
    _trajectories: Sequence[Trajectory] = field(default=(), init=False)
    _rewards: list[tuple[float, Metrics]] = field(default_factory=list, init=False)

    async def make_envs(self) -> Sequence[Env]:
        envs = await self.builder.make_envs()
        if not envs:
            raise ValueError("make_envs returned no environments")
        return envs

    async def reward(
        self, result: RolloutResult, policy: TokenCompleter, strategy: RetryWholeGroup
    ) -> list[RolloutError]:
        """Compute the rewards and keep them for `compute_group_rewards`.

        `do_group_rollout` asks for the rewards only after its strategy has returned, when nothing can be retried. So
        the strategy, `RetryWholeGroup.execute`, calls this method first. An inner `do_group_rollout`, whose rollout is
        already complete (`_RolledOut`), computes the rewards and applies the termination policy as in tinker-cookbook.
        The outer one then reads them from `compute_group_rewards`.

        The metrics of prompted judges are added to those of each trajectory, and the penalty for long completions to
        the rewards.

        Returns:
            Replies of prompted judges without a verdict, as errors of type `UnparsedVerdict`.

        Raises:
            TimeoutError: the rewards took longer than `grader_timeout_seconds` of the termination policy.
            ValueError: a reward is not finite, or a reward or a metric is not a number.
        """
        for member, trajectory in enumerate(result.trajectories):
            for turn in trajectory.transitions:
                turn.reward, turn.metrics = _to_numbers(member, turn.reward, turn.metrics)
        with record_verdicts() as record:
            group = await do_group_rollout(_Ungraded(self.builder), policy, _RolledOut(result), strategy.termination)
        pairs = zip(group.final_rewards_G, group.metrics_G, strict=True)
        pairs = (_to_numbers(member, reward, metrics) for member, (reward, metrics) in enumerate(pairs))
        self._rewards = [(reward, {**metrics, **record.metrics()}) for reward, metrics in pairs]
        if strategy.overlong:
            penalties = map(strategy.overlong.reward, result.trajectories)
            pairs = zip(self._rewards, penalties, strict=True)
            self._rewards = [(reward + penalty, {**metrics, OVERLONG: penalty}) for (reward, metrics), penalty in pairs]
        for member, (trajectory, (reward, metrics)) in enumerate(zip(result.trajectories, self._rewards, strict=True)):
            _check_rewards(member, trajectory, reward, metrics, strategy.rewards)
        self._trajectories = result.trajectories
        self.text_labels_G = tuple(dict(getattr(env, "text_labels", {})) for env in result.envs)
        return [RolloutError("UnparsedVerdict", reply) for reply in record.unparsed]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        assert trajectory_group is self._trajectories, "the strategy computes the rewards first"
        return self._rewards

    def take_group(self) -> Group | None:
        """Return the last successful attempt, once; None if none has succeeded since the last call.

        For evaluations, in which tinker-cookbook runs the group; tags and errors stay empty.
        """
        trajectories, self._trajectories = list(self._trajectories), ()
        if not trajectories:
            return None
        rewards, metrics = zip(*self._rewards, strict=True)
        group = TrajectoryGroup(trajectories, list(rewards), list(metrics))
        return Group(tags=(), trajectories=group, errors=(), text_labels_G=self.text_labels_G)

    async def cleanup(self) -> None:
        try:
            await self.builder.cleanup()
        except TinkerFlowsError:
            raise
        except FAILURES as error:
            self.cleanup_errors.append(_rollout_error(error))

    def logging_tags(self) -> list[str]:
        """Return the tags of the builder.

        Raises:
            ConfigError: the builder raised an error.
        """
        try:
            return list(self.builder.logging_tags())
        except FAILURES as error:
            reason = _rollout_error(error)
            raise ConfigError(
                f"logging_tags of {type(self.builder).__name__} failed ({reason.error_type}: {reason.error_message}): "
                "fix it."
            ) from error


def _to_numbers(member: int, reward: SupportsFloat, metrics: Mapping[str, object]) -> tuple[float, Metrics]:
    """Convert the reward and the metrics of a member, which may be tensors or numbers of NumPy, to numbers of Python.

    Raises:
        ValueError: one of them is not a number.
    """
    numbers = {name: _to_number(f"metric {name!r}", member, value) for name, value in metrics.items()}
    return float(_to_number("reward", member, reward)), numbers


def _to_number(what: str, member: int, value: object) -> float:
    if isinstance(value, int | float):
        return value
    if isinstance(value, SupportsFloat):
        with suppress(TypeError, ValueError, RuntimeError):  # an array or a tensor with several elements
            return float(value)
    raise ValueError(f"the {what} of member {member} is {value!r}, which is not a number")


def _check_rewards(member: int, trajectory: Trajectory, reward: float, metrics: Metrics, names: Sequence[str]) -> None:
    """Raise a ValueError if the final reward of a member, the reward of a turn or a named reward is not finite."""
    values = [("reward", reward)]
    values += [("reward", turn.reward) for turn in trajectory.transitions]
    for reported in (metrics, *(turn.metrics for turn in trajectory.transitions)):
        values += [(f"reward {name!r}", reported[name]) for name in names if name in reported]
    for what, value in values:
        if not math.isfinite(value):
            raise ValueError(f"the {what} of member {member} is {value}")


@dataclass(frozen=True)
class _Ungraded(EnvGroupBuilder):
    """Group whose rollout is complete but has no rewards yet; the outer rollout cleans up."""

    builder: EnvGroupBuilder

    async def make_envs(self) -> Sequence[Env]:
        raise AssertionError("the environments exist")

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        return await self.builder.compute_group_rewards(trajectory_group, env_group)


@dataclass(frozen=True)
class _RolledOut(RolloutStrategy):
    """Strategy of a group whose rollout is complete."""

    result: RolloutResult

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        return self.result


@dataclass(frozen=True)
class RetryWholeGroup(RolloutStrategy):
    """Strategy that retries a whole group, with fresh environments and seeds, until it has its rewards.

    An attempt fails if its environments cannot be made, if too few members succeed, or if the rewards raise an error.
    Errors of this project end the rollout at once, except those of the user's code in the rewards. The whole group is
    retried because its environments may share a game. Trajectories are in the order of the members, not of completion,
    so that the same seeds give the same batch.

    Attributes:
        max_retries: number of further attempts.
        min_successful: number of members that must succeed; None means all.
        timeout_s: time limit of one attempt; None means no limit.
        hook: hook that is called after each turn; None means none.
        termination: policy that changes the reward of an episode by the reason for its end; None means none.
        overlong: penalty for long completions; None means none.
        rewards: metrics of the environment that are rewards, which have to be finite.
    """

    max_retries: int = 2
    min_successful: int | None = None
    timeout_s: float | None = None
    hook: HookSpec | None = None
    termination: TerminationRewardPolicy | None = None
    overlong: OverlongPenalty | None = None
    rewards: tuple[str, ...] = ()

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        """Roll out a `RewardedGroup` and compute its rewards.

        Raises:
            AllTrajectoriesFailedError: every attempt failed.
            ServiceError: the service failed.
            ConfigError: a hook or a completer of the user returned an invalid value.
        """
        assert isinstance(policy, SnapshotCompleter)
        assert isinstance(env_group_builder, RewardedGroup)
        errors: list[RolloutError] = []
        for attempt in range(self.max_retries + 1):
            try:
                envs = await env_group_builder.make_envs()
            except TinkerFlowsError:
                raise
            except FAILURES as error:
                errors.append(_rollout_error(error))
                await self._clean_up_before_retry(env_group_builder, attempt)
                continue
            outcomes = await self._attempt(policy, attempt, envs)
            errors += [_rollout_error(outcome) for outcome in outcomes if isinstance(outcome, FAILURES)]
            pairs = zip(outcomes, envs, strict=True)
            successes = [(outcome, env) for outcome, env in pairs if isinstance(outcome, Trajectory)]
            num_needed = min(self.min_successful or len(envs), len(envs))  # a group may be smaller than min_successful
            if successes and len(successes) >= num_needed:
                # `result.errors` is this list, so it also has the errors that are added below.
                result = RolloutResult([outcome for outcome, _ in successes], [env for _, env in successes], errors)
                try:
                    errors += await env_group_builder.reward(result, policy, self)
                except UserCodeError as error:
                    errors.append(_rollout_error(error.__cause__ or error))
                except TimeoutError as error:
                    errors.append(self._grader_timeout(error))
                except TinkerFlowsError:
                    raise
                except FAILURES as error:
                    errors.append(_rollout_error(error))
                else:
                    return result
            await self._clean_up_before_retry(env_group_builder, attempt)
        raise _AllAttemptsFailedError(errors)

    async def _clean_up_before_retry(self, env_group_builder: EnvGroupBuilder, attempt: int) -> None:
        """Clean up after a failed attempt; the caller of `execute` cleans up after the last one."""
        if attempt < self.max_retries:
            await env_group_builder.cleanup()

    def _grader_timeout(self, error: TimeoutError) -> RolloutError:
        """Describe a TimeoutError of the rewards; the error of `grader_timeout_seconds` has no message of its own."""
        limit = self.termination.grader_timeout_seconds if self.termination else None
        if limit is None or str(error):
            return _rollout_error(error)
        text = f"the rewards took longer than rollout.termination.grader_timeout_seconds={limit}"
        return RolloutError(type(error).__name__, text)

    async def _attempt(
        self, policy: SnapshotCompleter, attempt: int, envs: Sequence[Env]
    ) -> list[Trajectory | BaseException]:
        """Outcome of each member; if all must succeed, the first failure cancels the other members."""
        policies = policy.members(attempt, len(envs))
        pairs = zip(policies, envs, strict=True)
        run = self.hook.run if self.hook else do_single_rollout
        members = [asyncio.create_task(run(completer, env)) for completer, env in pairs]
        until = asyncio.FIRST_EXCEPTION if self.min_successful is None else asyncio.ALL_COMPLETED
        try:
            completed, _ = await asyncio.wait(members, timeout=self.timeout_s, return_when=until)
        finally:
            for member in members:
                member.cancel()
        outcomes: list[Trajectory | BaseException] = await asyncio.gather(*members, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, TinkerFlowsError):
                raise outcome
        # Members that are not completed were cancelled above: after a failure of another member, or else at the time
        # limit. In the first case their outcome stays a CancelledError, which `execute` does not count as an error.
        one_failed = any(member.cancelled() or member.exception() for member in completed)
        timed_out = until == asyncio.ALL_COMPLETED or not one_failed
        for index, member in enumerate(members):
            if member in completed and member.cancelled():
                outcomes[index] = RuntimeError("the environment cancelled its own rollout")
            elif member not in completed and timed_out:
                outcomes[index] = TimeoutError(f"the rollout took longer than {self.timeout_s} s")
        return outcomes


@dataclass(frozen=True)
class HeldOutStrategy(RolloutStrategy):
    """Strategy of held-out groups, which share a completer: it gives each group seeds of its own.

    Attributes:
        strategy: strategy of each group.
        hangs: watch of the groups; None for no watch.
        step: step before which the groups are evaluated.
    """

    strategy: RetryWholeGroup
    hangs: HangWatch | None
    step: int

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        assert isinstance(policy, SnapshotCompleter)
        assert isinstance(env_group_builder, RewardedGroup)
        number = env_group_builder.number
        own = replace(policy, key=(*policy.key, number), progress=GroupProgress())
        with self.hangs.watching(f"held-out-{number}", self.step, own.progress) if self.hangs else nullcontext():
            return await self.strategy.execute(env_group_builder, own)


class _AllAttemptsFailedError(AllTrajectoriesFailedError):
    def __init__(self, errors: Sequence[RolloutError]) -> None:
        super().__init__("All attempts at a group failed.")
        self.errors = tuple(errors)


@retried_task(name="rollout", task_run_name="rollout-{step}-{index}")
def rollout(
    builder: EnvGroupBuilder, policy: SnapshotCompleter, strategy: RetryWholeGroup, step: int, index: int
) -> Group:
    """Roll out one group; an error of its environments or rewards fails only this group.

    A group that is cancelled has neither trajectories nor errors.

    Raises:
        ServiceError: the service failed to sample.
        ConfigError: a hook or a completer of the user returned an invalid value, or the builder has no tags.
    """
    group, began = RewardedGroup(builder), perf_counter()
    tags = tuple(group.logging_tags())
    trajectories, errors = None, tuple[RolloutError, ...]()
    try:
        trajectories = policy.progress.run(do_group_rollout(group, policy, strategy))
        errors = tuple(trajectories.rollout_errors)
    except TinkerFlowsError:
        raise
    except RolloutCancelledError:
        pass
    except _AllAttemptsFailedError as error:
        errors = error.errors
    except FAILURES as error:
        errors = (_rollout_error(error),)
    errors = (*errors, *group.cleanup_errors)
    duration_s = perf_counter() - began
    return Group(tags, trajectories, errors, group.text_labels_G, duration_s, policy.progress.counts.sampled)


class RolloutThreads:
    """Threads that roll out groups, one group each.

    Each thread waits only for the service and for its environments, never for another group, so groups beyond the
    number of threads start as soon as earlier ones end.

    Attributes:
        hangs: watch of the running groups, which its owner closes; None for no watch.
    """

    hangs: HangWatch | None = None

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT_GROUPS, thread_name_prefix="rollout")
        self._is_closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call on a thread, in the caller's context.

        Raises:
            concurrent.futures.CancelledError: the run is closed.
        """
        try:
            return self._pool.submit(copy_context().run, call)
        except RuntimeError as error:
            if self._is_closed:
                raise CancelledError("the run is closed") from error
            raise

    def start(
        self, builder: EnvGroupBuilder, policy: SnapshotCompleter, strategy: RetryWholeGroup, step: int, index: int
    ) -> RunningGroup:
        """Run `rollout` on a thread."""
        pending = self.submit(lambda: self.run(builder, policy, strategy, step, index))
        return RunningGroup(pending, policy.progress)

    def run(
        self, builder: EnvGroupBuilder, policy: SnapshotCompleter, strategy: RetryWholeGroup, step: int, index: int
    ) -> Group:
        """Run `rollout` on this thread."""
        name = f"rollout-{step}-{index}"  # as the name of its task run
        with self.hangs.watching(name, step, policy.progress) if self.hangs else nullcontext():
            return call(rollout, opaque_argument(builder), opaque_argument(policy), strategy, step, index)

    def close(self) -> None:
        """Drop the groups that have not started."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def _rollout_error(error: BaseException) -> RolloutError:
    text = f"it called {exit_call(error)}" if isinstance(error, SystemExit) else str(error)
    return RolloutError(type(error).__name__, f"{text}{place_in_user_code(error)}".strip())

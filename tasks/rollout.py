"""The rollout of one group: its environments share state, rewards and one event loop, and so one task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError, Trajectory, TrajectoryGroup

from blocks.errors import TinkerFlowsError
from tasks.options import retried_task
from tasks.policy import Policy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """A group of trajectories with what it came from.

    Attributes:
        tags: under which its metrics are logged.
        trajectories: of its members, in their order; None where too few succeeded.
        errors: what went wrong in its environments, in all attempts.
    """

    tags: tuple[str, ...]
    trajectories: TrajectoryGroup | None
    errors: tuple[RolloutError, ...]


@dataclass(frozen=True)
class Patient(RolloutStrategy):
    """Plays a group again, with fresh environments and seeds, until enough of its members succeed.

    The whole group, because its environments may share a game. The trajectories are in the order of the members,
    whichever ended first, so that the same seeds make the same batch.

    Attributes:
        max_retries: further attempts.
        min_successful: members that are enough; all of them for None.
        timeout_s: of one attempt; None for no limit.
    """

    max_retries: int = 2
    min_successful: int | None = None
    timeout_s: float | None = None

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        """Raises: AllTrajectoriesFailedError, which ends the group; ServiceError, which ends the step."""
        assert isinstance(policy, Policy)
        errors: list[RolloutError] = []
        for attempt in range(self.max_retries + 1):
            envs = await env_group_builder.make_envs()
            ended = await self._play(policy, attempt, envs)
            errors += [_noted(each) for each in ended if isinstance(each, Exception)]
            good = [(each, env) for each, env in zip(ended, envs, strict=True) if isinstance(each, Trajectory)]
            if good and len(good) >= min(self.min_successful or len(envs), len(envs)):
                return RolloutResult([each for each, _ in good], [env for _, env in good], errors)
            await env_group_builder.cleanup()
        raise _TooFewError(errors)

    async def _play(self, policy: Policy, attempt: int, envs: Sequence[Env]) -> list[Trajectory | BaseException]:
        """What became of each member; one that was still playing when another's failure ended it was cancelled."""
        policies = policy.members(attempt, len(envs))
        members = [asyncio.create_task(do_single_rollout(each, env)) for each, env in zip(policies, envs, strict=True)]
        until = asyncio.FIRST_EXCEPTION if self.min_successful is None else asyncio.ALL_COMPLETED
        try:
            done, _ = await asyncio.wait(members, timeout=self.timeout_s, return_when=until)
        finally:
            for each in members:
                each.cancel()
        ended: list[Trajectory | BaseException] = await asyncio.gather(*members, return_exceptions=True)
        for each in ended:
            if isinstance(each, TinkerFlowsError):
                raise each
        one_failed = any(each.exception() for each in done)
        if until == asyncio.ALL_COMPLETED or not one_failed:
            late = TimeoutError(f"the rollout took longer than {self.timeout_s} s")
            ended = [each if member in done else late for member, each in zip(members, ended, strict=True)]
        return ended


class _TooFewError(AllTrajectoriesFailedError):
    def __init__(self, errors: Sequence[RolloutError]) -> None:
        super().__init__("Too few members of a group succeeded.")
        self.errors = tuple(errors)


@retried_task(name="rollout", task_run_name="rollout-{step}-{index}")
def rollout(builder: EnvGroupBuilder, policy: Policy, strategy: Patient, step: int, index: int) -> Group:
    """Play one group; what fails in its environments costs the group alone.

    Raises:
        ServiceError: the service failed while its tokens were sampled.
    """
    tags = tuple(builder.logging_tags())
    try:
        played = run_coroutine(do_group_rollout(builder, policy, strategy))
    except TinkerFlowsError:
        raise
    except _TooFewError as failed:
        return Group(tags, None, failed.errors)
    except Exception as error:  # noqa: BLE001 - somebody else's environments and rewards
        return Group(tags, None, (_noted(error),))
    return Group(tags, played, tuple(played.rollout_errors))


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on the loop that all groups share: the tokenizers of their environments are not for several threads."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def cancel_coroutines() -> None:
    """End what runs there: of a run that is over, nobody waits for it."""
    loop = _loop()
    loop.call_soon_threadsafe(lambda: [each.cancel() for each in asyncio.all_tasks(loop)])


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rollouts", daemon=True).start()
    return loop


def _noted(error: Exception) -> RolloutError:
    return RolloutError(type(error).__name__, str(error))

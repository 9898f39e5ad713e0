"""Rollouts beside the training: groups are played all the time, by weights of at most so many steps ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any, NamedTuple

import tinker
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch
from tasks.options import Pending, call, whole
from tasks.problems import split
from tasks.rollout import Group, rollout
from tasks.rollouts import Cut, Play, RolloutSource, wait_for_snapshot
from tasks.source import Trained
from tasks.trajectories import count_tokens


class Place(NamedTuple):
    """Where a group stands in the data: the step it would be played at on-policy, and its number there."""

    step: int
    group: int


@dataclass(frozen=True, slots=True)
class Played:
    """A group that was played.

    Attributes:
        version: the step whose weights played it.
    """

    place: Place
    version: int
    group: Group


@dataclass(frozen=True, slots=True)
class Weights:
    """The newest weights that groups are played by, and the step that starts from them."""

    version: int
    sampler: tinker.SamplingClient


class OffPolicySource(RolloutSource):
    """The environments of a run, played beside its training.

    As many groups are under way, or played and not yet trained on, as the steps within the bound can take; those that
    are too old by the time their step comes are played again. Each group is trained on once, by a resumed run too.
    """

    def __init__(
        self,
        train: RLDataset,
        test: RLDataset | None,
        tokenizer: Tokenizer,
        play: Play,
        cut: Cut,
        max_steps_off_policy: int,
    ) -> None:
        super().__init__(train, test, tokenizer, play, cut)
        self._max_age = max_steps_off_policy
        self._size = self.problems.groups_per_batch
        self._players = ThreadPoolExecutor(max_workers=1024)
        self._changed = Condition()
        # All below are read and written under it.
        self._waiting: deque[Place] = deque()
        self._next_step = 0  # whose groups are waited for by nobody yet
        self._playing: dict[Place, int] = {}  # and the version of the weights
        self._played: list[Played] = []
        self._failed: list[Group] = []
        self._taken: dict[int, list[Played]] = {}
        self._stale: list[Group] = []
        self._num_steps = 0
        self._step = 0  # that takes the next groups
        self._weights: Weights | None = None
        self._error: BaseException | None = None

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        # A run that was forked from another may have other groups.
        same = state.get("groups_per_batch") == self._size
        self._next_step = state["next_step"] if same else step
        self._waiting = deque(Place(*place) for place in state["untrained"]) if same else deque()
        self._num_steps = num_steps

    def state(self, step: int) -> dict[str, Any]:
        with self._changed:
            later = [each.place for taken_at, taken in self._taken.items() if taken_at >= step for each in taken]
            untrained = {*self._waiting, *self._playing, *(each.place for each in self._played), *later}
            return {
                "groups_per_batch": self._size,
                "next_step": self._next_step,
                "untrained": sorted(untrained),
            }

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Take a snapshot of the weights to go on playing with, and take the groups of a step as they are played."""
        snapshot = client.save_weights_and_get_sampling_client()
        with self._changed:
            self._step = step
            self._taken = {taken_at: taken for taken_at, taken in self._taken.items() if taken_at >= step - 1}

        def wait(part: range) -> list[Group]:
            if part.start == 0:
                weights = Weights(step, wait_for_snapshot(snapshot))
                with self._changed:
                    self._weights = weights
            return self._take(step, len(part))

        return [self.start_gathering(step, partial(wait, part)) for part in split(self._size, self.num_parts)]

    def metrics(self, step: int, trained: Sequence[Trained], terms: Mapping[str, float]) -> dict[str, float]:
        with self._changed:
            ages = [step - each.version for each in self._taken[step]]
            failed, self._failed = self._failed, []
            stale, self._stale = self._stale, []
        self._groups[step].append(failed)
        self._sampled += count_tokens(stale)
        return super().metrics(step, trained, terms) | {
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": float(max(ages)),
            "async/groups_replayed": float(len(stale)),
        }

    def close(self) -> None:
        with self._changed:
            self._num_steps = 0
        super().close()
        self._players.shutdown(wait=False, cancel_futures=True)

    def _take(self, step: int, num_groups: int) -> list[Group]:
        """The next groups that are fresh enough for a step, oldest first, once there are so many."""
        with self._changed:
            while True:
                if self._error:
                    raise self._error
                self._drop_stale(step)
                if len(self._played) >= num_groups:
                    break
                self._start()
                self._changed.wait()
            self._played.sort(key=lambda each: (each.version, each.place))
            taken, self._played = self._played[:num_groups], self._played[num_groups:]
            assert all(step - each.version <= self._max_age for each in taken)
            self._taken.setdefault(step, []).extend(taken)
            self._start()
            return [each.group for each in taken]

    def _drop_stale(self, step: int) -> None:
        stale = [each for each in self._played if step - each.version > self._max_age]
        self._played = [each for each in self._played if step - each.version <= self._max_age]
        self._waiting.extendleft(sorted((each.place for each in stale), reverse=True))
        self._stale += [each.group for each in stale]

    def _start(self) -> None:
        """Play as many groups as the steps up to the oldest that may train on these weights can take."""
        if self._weights is None or self._error:
            return
        steps = min(self._weights.version + self._max_age + 1, self._num_steps) - self._step
        wanted = steps * self._size - len(self._taken.get(self._step, ()))
        # One that will be too old when it comes holds up nobody.
        fresh = sum(self._step - version <= self._max_age for version in self._playing.values()) + len(self._played)
        for _ in range(wanted - fresh):
            if not self._waiting:
                num_groups = len(self.problems.of_step(self._next_step))
                self._waiting.extend(Place(self._next_step, index) for index in range(num_groups))
                self._next_step += 1
            place = self._waiting.popleft()
            self._playing[place] = self._weights.version
            # Taken here, because a dataset is not for several threads.
            builder = self.problems.of_step(place.step)[place.group]
            self._players.submit(copy_context().run, self._play, place, builder, self._weights)

    def _play(self, place: Place, builder: EnvGroupBuilder, weights: Weights) -> None:
        try:
            policy = self.play.policy(weights.sampler, weights.version, *place)
            group = call(rollout, whole(builder), policy, self.play.strategy, place.step, place.group)
            error: BaseException | None = None
        except BaseException as failure:  # noqa: BLE001 - raised where the groups are waited for
            group, error = None, failure
        with self._changed:
            del self._playing[place]
            if error:
                self._error = self._error or error
            elif group and group.trajectories is not None:
                self._played.append(Played(place, weights.version, group))
            elif group:
                self._note_failed(group)
            self._start()
            self._changed.notify_all()

    def _note_failed(self, group: Group) -> None:
        """Another group takes its place, unless none can be played."""
        self._failed.append(group)
        if len(self._failed) > 2 * self._size and not self._played:
            said = next((str(each.error_message) for each in group.errors), "no error")
            self._error = ConfigError(
                f"{len(self._failed)} groups on end could not be played ({' '.join(said.split())[:300]}): look at the "
                "environment, or raise rollout.max_retries or rollout.timeout_s."
            )

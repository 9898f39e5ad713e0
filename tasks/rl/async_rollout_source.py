"""Asynchronous rollouts: groups are rolled out during training, with weights of bounded age."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition
from typing import Any, NamedTuple

import tinker
import torch
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch
from tasks.common.task import Pending
from tasks.rl.group_batches import split
from tasks.rl.mismatch import STALENESS
from tasks.rl.rollout_source import MinibatchSettings, RolloutSettings, RolloutSource
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import GROUP_INDEX, count_tokens, first_error
from tasks.training.batch_source import SampledTokens, TrainedBatch


class Place(NamedTuple):
    """Position of a group in the data: the step that would train on it in mode `sync`, and its index in that step."""

    step: int
    group: int


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """Completed rollout of a group.

    Attributes:
        place: position of the group in the data.
        version: step whose starting weights sampled the group.
        group: result of the rollout.
    """

    place: Place
    version: int
    group: Group


@dataclass(frozen=True, slots=True)
class Weights:
    """Newest snapshot for rollouts, and the step that starts from its weights."""

    version: int
    sampler: tinker.SamplingClient


class AsyncRolloutSource(RolloutSource):
    """Source of rollouts that run concurrently with training.

    The number of running and completed groups is limited to what the steps within the age bound can train on. Completed
    groups that become too old before a step takes them are rolled out again. No group is trained on twice, even in a
    resumed run. A failed group is replaced by the next one; with `refill_rounds`, so is a group that teaches nothing.
    """

    def __init__(
        self,
        train: RLDataset,
        test: RLDataset | None,
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        minibatches: MinibatchSettings,
        max_steps_off_policy: int,
    ) -> None:
        super().__init__(train, test, tokenizer, settings, minibatches)
        self._max_age = max_steps_off_policy
        self._size = self.problems.groups_per_batch
        self._changed = Condition()
        # `_changed` guards all attributes below.
        self._waiting: deque[Place] = deque()
        self._next_step = 0  # first step whose groups have not been queued
        self._running: dict[Place, int] = {}  # place of each running group: version of the weights that sample it
        self._completed: list[CompletedGroup] = []
        # Groups since the metrics of the last step: failed ones, ones that teach nothing, and ones that became too old.
        self._failed: list[Group] = []
        self._discarded: list[Group] = []
        self._stale: list[Group] = []
        self._taken: dict[int, list[CompletedGroup]] = {}  # by the step that trains on the groups
        self._num_steps = 0
        self._step = 0  # step that takes groups next
        self._weights: Weights | None = None
        self._error: BaseException | None = None

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        super().begin(step, num_steps, state)
        # If a changed environment has another number of groups per step, the places of the state mean nothing.
        same_size = state.get("groups_per_batch") == self._size
        self._next_step = state["next_step"] if same_size else step
        self._waiting = deque(Place(*place) for place in state["untrained"]) if same_size else deque()
        self._num_steps = num_steps

    def state(self, step: int) -> dict[str, Any]:
        with self._changed:
            later = [
                completed.place
                for taken_at, taken_groups in self._taken.items()
                if taken_at >= step
                for completed in taken_groups
            ]
            untrained = {
                *self._waiting,
                *self._running,
                *(completed.place for completed in self._completed),
                *later,
            }
            return super().state(step) | {
                "groups_per_batch": self._size,
                "next_step": self._next_step,
                "untrained": sorted(untrained),
            }

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Take a snapshot for further rollouts, and start building the minibatches of a step as its groups complete."""
        with self._changed:
            self._step = step  # first: the rewards of groups that are discarded from now on belong to this step
        self.start_step(step)
        snapshot = self.take_snapshot(step, client)
        with self._changed:
            self._taken = {taken_at: groups for taken_at, groups in self._taken.items() if taken_at >= step - 1}

        def wait(part: range) -> list[Group]:
            if part.start == 0:  # the first minibatch also waits for the snapshot of the groups that start from now on
                weights = Weights(step, self.wait_for_sampler(snapshot))
                with self._changed:
                    self._weights = weights
            return self._take(step, len(part))

        return self.start_gathering(step, [partial(wait, part) for part in split(self._size, self.num_parts)])

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        """Build a minibatch; its label `STALENESS` is the age of the weights that sampled each datum, in steps."""
        batch = super().gather(step, groups)
        with self._changed:
            versions = {id(completed.group): completed.version for completed in self._taken[step]}
        ages_G = torch.tensor([step - versions[id(group)] for group in groups])
        return replace(batch, labels_D={**batch.labels_D, STALENESS: ages_G[batch.labels_D[GROUP_INDEX]]})

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        with self._changed:
            ages = [step - completed.version for completed in self._taken[step]]
            failed, self._failed = self._failed, []
            discarded, self._discarded = self._discarded, []
            stale, self._stale = self._stale, []
            num_ready, num_running = len(self._completed), len(self._running)
        self.fit_critic(step)  # on the groups that the step has trained on
        self._groups[step].append([*failed, *discarded])
        self.count(count_tokens(stale))
        return super().metrics(step, trained, terms) | {
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": float(max(ages)),
            "async/groups_replayed": float(len(stale)),
            "async/stale_share": len(stale) / (len(stale) + len(ages)),
            "async/groups_ready": float(num_ready),
            "async/groups_running": float(num_running),
        }

    def stop_sampling(self) -> SampledTokens:
        with self._changed:
            self._num_steps = min(self._num_steps, self._step + 1)  # the groups of this step have all started
        return super().stop_sampling()

    def close(self) -> None:
        with self._changed:
            self._num_steps = 0
            self._error = self._error or CancelledError("the run is closed")  # ends a thread that waits in `_take`
            self._changed.notify_all()
        super().close()

    def _take(self, step: int, num_groups: int) -> list[Group]:
        """Wait for `num_groups` groups within the age bound of a step, and take the oldest ones."""
        with self._changed:
            while True:
                if self._error:
                    raise self._error
                self._drop_stale(step)
                if len(self._completed) >= num_groups:
                    break
                self._start()
                self._changed.wait()
            self._completed.sort(key=lambda completed: (completed.version, completed.place))
            oldest, self._completed = self._completed[:num_groups], self._completed[num_groups:]
            assert all(step - completed.version <= self._max_age for completed in oldest)
            self._taken.setdefault(step, []).extend(oldest)
            self._start()
            return [completed.group for completed in oldest]

    def _drop_stale(self, step: int) -> None:
        oldest_version = step - self._max_age
        stale = [completed for completed in self._completed if completed.version < oldest_version]
        self._completed = [completed for completed in self._completed if completed.version >= oldest_version]
        self._waiting.extendleft(sorted((completed.place for completed in stale), reverse=True))
        self._stale += [completed.group for completed in stale]

    def _start(self) -> None:
        """Start groups until enough run or are completed for all steps that may train on the newest weights' groups."""
        if self._weights is None or self._error:
            return
        steps = min(self._weights.version + self._max_age + 1, self._num_steps) - self._step
        num_needed = steps * self._size - len(self._taken.get(self._step, ()))
        # A running group that will be too old for this step does not count: it is rolled out again.
        num_running = sum(self._step - version <= self._max_age for version in self._running.values())
        for _ in range(num_needed - num_running - len(self._completed)):
            if not self._waiting:
                num_groups = len(self.problems.at(self._next_step))
                self._waiting.extend(Place(self._next_step, index) for index in range(num_groups))
                self._next_step += 1
            place = self._waiting.popleft()
            self._running[place] = self._weights.version
            # Built here, under the lock, because a dataset is not thread-safe.
            builder = self.problems.at(place.step)[place.group]
            self._threads.submit(partial(self._roll_out, place, builder, self._weights))

    def _roll_out(self, place: Place, builder: EnvGroupBuilder, weights: Weights) -> None:
        try:
            policy = self.policy(weights.sampler, weights.version, *place)
            group = self._threads.run(builder, policy, self.settings.strategy, place.step, place.group)
            error: BaseException | None = None
        except BaseException as failure:  # noqa: BLE001 - `_take` raises it
            group, error = None, failure
        with self._changed:
            del self._running[place]
            try:
                if error:
                    raise error
                assert group is not None
                self._sort_in(CompletedGroup(place, weights.version, group))
                self._start()
            except BaseException as failure:  # noqa: BLE001 - `_take` raises it
                self._error = self._error or failure
            finally:
                self._changed.notify_all()

    def _sort_in(self, completed: CompletedGroup) -> None:
        """Keep a group for a step, or record that the next group replaces it."""
        if completed.group.trajectories is None:
            self._note_failed(completed.group)
        elif self._should_replace(completed.group):
            self._discarded.append(completed.group)
            if self.rewards:
                self.rewards.add(self._step, [completed.group])
        else:
            self._completed.append(completed)

    def _should_replace(self, group: Group) -> bool:
        """Return whether the next group replaces a completed one, which teaches nothing, while refills remain."""
        limit = self.settings.refill_rounds * self._size
        return len(self._discarded) < limit and not self.can_teach(group)

    def _note_failed(self, group: Group) -> None:
        """Record a failed group, which the next group replaces.

        The run fails if more groups have failed since the metrics of the last step than two steps need, and more than
        twice as many as were completed or discarded.
        """
        self._failed.append(group)
        if len(self._failed) > 2 * (self._size + len(self._completed) + len(self._discarded)):
            self._error = ConfigError(
                f"{len(self._failed)} groups failed since the last step ({first_error([group])}): check the "
                "environment, or raise rollout.max_retries or rollout.timeout_s."
            )

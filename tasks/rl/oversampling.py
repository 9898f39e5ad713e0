"""Over-sampling: a step starts more groups than it trains on, and cancels those that have not finished.

Which groups finish first depends on time, so the groups of each minibatch are stored with the run before they are
trained on: a resumed run trains on the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass
from itertools import takewhile
from queue import SimpleQueue
from threading import Event
from typing import Any

from tinker_cookbook.rl.types import EnvGroupBuilder

from blocks.storage import RunDirectory
from tasks.common.jsonl import read_jsonl
from tasks.rl.rollouts.group_rollout import Group, RunningGroup
from tasks.rl.trajectories import rollouts_of
from tasks.training.batch_source import SampledTokens

OVERSAMPLED_NAME = "oversampled.jsonl"


@dataclass(frozen=True, slots=True)
class CancelledGroups:
    """Groups that a step has cancelled.

    Attributes:
        num: number of groups that no minibatch took, finished ones included.
        num_prefill_tokens: prompt tokens of all their requests.
        num_cached_tokens: part of the prompt tokens that the service bills as cache hits.
        num_sample_tokens: sampled tokens in the responses to their requests.
        num_completions: completions in these responses.
        num_open: completions that the service had not returned.
        max_uncounted: upper bound of the tokens that the service sampled for the `num_open` completions.
    """

    num: int
    num_prefill_tokens: int
    num_cached_tokens: int
    num_sample_tokens: int
    num_completions: int
    num_open: int
    max_uncounted: int

    @property
    def sampled(self) -> SampledTokens:
        """Tokens that are known to be sampled, and the prompts of all requests."""
        return SampledTokens(self.num_prefill_tokens, self.num_sample_tokens, self.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class MinibatchGroups:
    """Groups that a minibatch takes, failed ones included.

    Attributes:
        step: the step.
        part: number of the minibatch in the step.
        groups: indices of its groups among those that the step started.
        cancelled: groups that the step has cancelled; None except for the last minibatch.
    """

    step: int
    part: int
    groups: tuple[int, ...]
    cancelled: CancelledGroups | None = None


class OversamplingRecord:
    """Groups of the minibatches of a run, stored in its directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._parts = {(part.step, part.part): part for part in read_jsonl(directory, OVERSAMPLED_NAME, _parse)}

    def get(self, step: int, part: int) -> MinibatchGroups | None:
        """Return the groups of a minibatch; None if they are not known yet."""
        return self._parts.get((step, part))

    def add(self, part: MinibatchGroups) -> None:
        """Store the groups of a minibatch; returns once they are durable."""
        self._directory.append_line(OVERSAMPLED_NAME, json.dumps(asdict(part)))
        self._parts[part.step, part.part] = part


def _parse(row: Mapping[str, Any]) -> MinibatchGroups:
    cancelled = row["cancelled"]
    return MinibatchGroups(
        row["step"], row["part"], tuple(row["groups"]), CancelledGroups(**cancelled) if cancelled else None
    )


class Oversampling:
    """Minibatches of one step, from the groups that finish first.

    The first minibatch takes the groups that finish first, the second one those that finish next, and so on. Groups
    that failed do not count, as long as other groups may take their place. After the last minibatch, the remaining
    groups are cancelled.

    Attributes:
        cancelled: groups that the step has cancelled, once its last minibatch is complete.
        is_repeated: True if the groups were stored before, so that none was cancelled now.
    """

    def __init__(
        self,
        step: int,
        builders: Sequence[EnvGroupBuilder],
        sizes: Sequence[int],
        start: Callable[[Mapping[int, EnvGroupBuilder]], Sequence[RunningGroup]],
        record: OversamplingRecord,
    ) -> None:
        """Prepare the minibatches; `begin` starts the groups.

        Args:
            builders: groups that the step may start, in the order of the data.
            sizes: number of groups of each minibatch.
            start: starts groups by their index.
        """
        self._step, self._sizes, self._start, self._record = step, sizes, start, record
        stored_parts = (record.get(step, part) for part in range(len(sizes)))
        # Only the records before the first missing one: its minibatch failed in an earlier process, and now may take
        # groups that a later record contains.
        self._known = [part for part in takewhile(lambda part: part is not None, stored_parts) if part]
        self.is_repeated = len(self._known) == len(sizes)
        stored = {index for part in self._known for index in part.groups}
        self._builders = {
            index: builder for index, builder in enumerate(builders) if index in stored or not self.is_repeated
        }
        self.cancelled: CancelledGroups | None = None
        self._running: dict[int, RunningGroup] = {}
        self._finished: SimpleQueue[int | None] = SimpleQueue()  # None once this is closed
        self._is_closed = False
        self._taken = set(stored)  # also if a stored group fails, so that no other minibatch takes the rest
        self._started: Future[None] = Future()
        self._is_complete = [Event() for _ in sizes]

    def begin(self) -> None:
        """Start the groups; `take` raises the error if this fails."""
        try:
            for index, running in zip(self._builders, self._start(self._builders), strict=True):
                self._running[index] = running
                running.pending.add_done_callback(lambda _, index=index: self._finished.put(index))
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            self._started.set_exception(error)
        else:
            self._started.set_result(None)

    def close(self) -> None:
        """End the waits of `take`, so that no minibatch contains groups that were cancelled because the run ends."""
        self._is_closed = True
        self._finished.put(None)

    def take(self, number: int) -> list[Group]:
        """Wait for the groups of a minibatch; return them in the order of the data.

        A minibatch that fails does not block the next one.

        Raises:
            ServiceError: the service failed to sample one of them.
            CancelledError: the run was closed before they had finished.
        """
        try:
            self._started.result()
            if number:
                self._is_complete[number - 1].wait()
            known = self._known[number] if number < len(self._known) else None
            indices = known.groups if known else self._first(number)
            groups = [self._running[index].pending.result() for index in indices]
            self._taken.update(indices)
            if self._is_closed:
                raise CancelledError
            is_last = number == len(self._sizes) - 1
            if known is None:
                cancelled = self._cancel_others() if is_last else None
                known = MinibatchGroups(self._step, number, tuple(indices), cancelled)
                self._record.add(known)
            if is_last:
                self.cancelled = known.cancelled
            return groups
        finally:
            self._is_complete[number].set()

    def _first(self, number: int) -> list[int]:
        """Wait for the groups of a minibatch; return their indices. Leave enough groups for the later minibatches."""
        num_available = len(self._running) - len(self._taken) - sum(self._sizes[number + 1 :])
        indices, num_successful = list[int](), 0
        try:
            while num_successful < self._sizes[number] and len(indices) < num_available:
                index = self._finished.get()
                if index is None or self._is_closed:
                    self._finished.put(None)  # for the minibatches that wait next
                    raise CancelledError
                if index not in self._taken:
                    num_successful += self._is_successful(index)
                    indices.append(index)
        except BaseException:
            for index in indices:
                self._finished.put(index)
            raise
        return sorted(indices)

    def _is_successful(self, index: int) -> bool:
        """Return whether a finished group has trajectories; a group that raises is left out of later minibatches."""
        try:
            return self._running[index].pending.result().trajectories is not None
        except BaseException:
            self._taken.add(index)
            raise

    def _cancel_others(self) -> CancelledGroups:
        others = [running for index, running in self._running.items() if index not in self._taken]
        counts = [running.progress.counts for running in others]  # before they are cancelled and no longer open
        for running in others:
            running.pending.cancel()
            running.progress.cancel()
        known = sum((count.sampled + count.open_prompts for count in counts), SampledTokens())
        return CancelledGroups(
            len(others),
            known.num_prefill_tokens,
            known.num_cached_tokens,
            known.num_sample_tokens,
            sum(count.num_completions for count in counts),
            sum(count.num_open for count in counts),
            sum(count.max_open_tokens for count in counts),
        )


def compute_oversampling_metrics(groups: Sequence[Group], cancelled: CancelledGroups) -> dict[str, float]:
    """Compute the numbers of cancelled groups and of their tokens, and mean lengths of completions in tokens.

    `length_kept` is the mean without the cancelled groups. `length_all_max` includes them, as if each completion that
    the service had not returned had reached its limit.
    """
    kept_turns = [turn for trajectory, _ in rollouts_of(groups) for turn in trajectory.transitions]
    num_kept, num_tokens = len(kept_turns), sum(len(turn.ac.tokens) for turn in kept_turns)
    all_tokens = num_tokens + cancelled.num_sample_tokens + cancelled.max_uncounted
    num_all = num_kept + cancelled.num_completions + cancelled.num_open
    return {
        "oversampling/cancelled_groups": float(cancelled.num),
        "oversampling/cancelled_tokens": float(cancelled.num_sample_tokens),
        "oversampling/uncounted_tokens_max": float(cancelled.max_uncounted),
        "oversampling/length_kept": num_tokens / max(num_kept, 1),
        "oversampling/length_all_max": all_tokens / max(num_all, 1),
    }

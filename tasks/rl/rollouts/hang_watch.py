"""Watch for environments, rewards and completers that no longer respond while their step waits for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from statistics import median
from threading import Event, Lock, Thread
from time import monotonic

from tasks.rl.health import HealthLimits
from tasks.rl.rollouts.group_progress import GroupProgress, ProgressCounts
from tasks.training.batch_source import MetricWarning

logger = logging.getLogger(__name__)

_NUM_DURATIONS = 256  # last groups whose median duration counts
_MAX_INTERVAL_S = 1.0
_NUM_SHOWN = 3
_CLOSE_S = 5.0  # time limit of `close`: a callback that does not end must not keep the run open
HANG_FIX = "check it; rollout.timeout_s ends rollouts that take too long"


@dataclass
class _RunningGroup:
    """Group that is being rolled out.

    Attributes:
        counts: tokens at the last check.
        since: time of the last request or response of its sampler.
    """

    name: str
    step: int
    progress: GroupProgress
    counts: ProgressCounts
    since: float


class HangWatch:
    """Watch of running groups on a thread of its own.

    A group hangs if it has no open request for samples and has sent none for `hang_seconds`, and for `hang_factor`
    times the median duration of the last groups that ended, failed and cancelled ones included. Before any group has
    ended, the bound is `hang_factor` times `hang_seconds`. The time limit of an attempt is added to the bound, because
    the rollout ends attempts that take too long by itself. Each step causes at most one warning.

    Args:
        timeout_s: time limit of one attempt at a group; None means no limit.
        report: callback that gets the warnings.
        fix: what the user can do about a group that hangs, for the warnings.
    """

    def __init__(
        self,
        limits: HealthLimits,
        timeout_s: float | None,
        report: Callable[[MetricWarning], None],
        fix: str = HANG_FIX,
    ) -> None:
        self._limits, self._timeout_s, self._report, self._fix = limits, timeout_s or 0.0, report, fix
        self._lock = Lock()
        self._running: dict[int, _RunningGroup] = {}
        self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)
        self._num_started = 0
        self._warned_steps: set[int] = set()
        self._is_closed = Event()
        # In the caller's context, which has the logger of the flow run.
        self._thread = Thread(target=copy_context().run, args=[self._watch], name="hang-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, name: str, step: int, progress: GroupProgress) -> Iterator[None]:
        """Watch a group during the block."""
        began = monotonic()
        with self._lock:
            key = self._num_started = self._num_started + 1
            self._running[key] = _RunningGroup(name, step, progress, progress.counts, began)
        try:
            yield
        finally:
            with self._lock:
                del self._running[key]
                self._durations.append(monotonic() - began)

    def close(self) -> None:
        """End the watch."""
        self._is_closed.set()
        self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        while not self._is_closed.wait(min(_MAX_INTERVAL_S, self._limits.hang_seconds / 4)):
            for warning in self._check(monotonic()):
                try:
                    self._report(warning)
                except Exception:
                    logger.exception("The report of a warning failed: %s", warning.text)

    def _check(self, now: float) -> list[MetricWarning]:
        """Return a warning for each step whose groups have begun to hang."""
        hanging: dict[int, list[tuple[_RunningGroup, float]]] = {}
        with self._lock:
            typical = median(self._durations) if self._durations else None
            for group in self._running.values():
                counts = group.progress.counts  # each request and each response replaces the object
                if counts.num_open or counts is not group.counts:
                    group.counts, group.since = counts, now
                waited = now - group.since
                if waited > self._bound(typical) and group.step not in self._warned_steps:
                    hanging.setdefault(group.step, []).append((group, waited))
            self._warned_steps |= hanging.keys()
        return [self._warning(step, groups, typical) for step, groups in hanging.items()]

    def _bound(self, typical: float | None) -> float:
        """Return the seconds without a response after which a group counts as hanging."""
        limits = self._limits
        if typical is None:
            return self._timeout_s + limits.hang_factor * limits.hang_seconds
        return self._timeout_s + max(limits.hang_seconds, limits.hang_factor * typical)

    def _warning(
        self, step: int, groups: Sequence[tuple[_RunningGroup, float]], typical: float | None
    ) -> MetricWarning:
        names = ", ".join(group.name for group, _ in groups[:_NUM_SHOWN])
        more = f" and {len(groups) - _NUM_SHOWN} more" if len(groups) > _NUM_SHOWN else ""
        waited = max(seconds for _, seconds in groups)
        others = "no group has ended yet" if typical is None else f"the median group takes {typical:.3g} s"
        text = (
            f"The environment, reward, hook or completer of {names}{more} has not responded for {waited:.3g} s, and "
            f"{others}: {self._fix}."
        )
        return MetricWarning("hang", step, waited, text)

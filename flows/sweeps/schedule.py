"""Which trial of a sweep is next, by what its directory says of the ones before."""

from __future__ import annotations

from statistics import fmean

from blocks.storage import RunDirectory
from flows.sweeps.plan import SweepPlan
from flows.sweeps.search import Tried
from tasks.trials import Point, Trial, Trials, read_trials, record_point, record_trial


class Schedule:
    """Which trial is next: those of the points that are recorded, in order, and then those of the next point."""

    def __init__(self, plan: SweepPlan, directory: RunDirectory) -> None:
        self._plan, self._directory = plan, directory
        recorded = read_trials(directory)
        self._points, self._ended = list(recorded.points), dict(recorded.ended)
        # A trial that failed before is tried again: whoever starts a sweep again may have mended what it failed of.
        self._taken = {key for key, trial in self._ended.items() if trial.status != "failed"}

    @property
    def trials(self) -> Trials:
        return Trials(tuple(self._points), dict(self._ended))

    @property
    def num_trials(self) -> int:
        return max(self._plan.num_points, len(self._points)) * len(self._plan.config.seeds)

    @property
    def num_left(self) -> int:
        return self.num_trials - sum(seed in self._plan.config.seeds for _, seed in self._taken)

    def take(self) -> tuple[Point, int] | None:
        """The next trial, whose point is recorded before it begins; None where there is no more."""
        for point in self._points:
            for seed in self._plan.config.seeds:
                if (point.number, seed) not in self._taken:
                    self._taken.add((point.number, seed))
                    return point, seed
        point = self._plan.next_point([self._tried(each) for each in self._points])
        if point is None:
            return None
        record_point(self._directory, point)
        self._points.append(point)
        return self.take()

    def end(self, trial: Trial) -> None:
        """Keep how a trial ended."""
        record_trial(self._directory, trial)
        self._ended[trial.point, trial.seed] = trial

    def _tried(self, point: Point) -> Tried:
        trials = [self._ended.get((point.number, seed)) for seed in self._plan.config.seeds]
        values = [each.value for each in trials if each and each.value is not None]
        return Tried(point.values, fmean(values) if values else None, all(each is not None for each in trials))

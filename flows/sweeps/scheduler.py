"""Order of a sweep's trials, given the trials recorded in its directory."""

from __future__ import annotations

from statistics import fmean

from blocks.storage import RunDirectory
from flows.sweeps.plan import SweepPlan
from flows.sweeps.search import TriedPoint
from tasks.sweeps.store import Point, Trial, Trials, read_trials, record_point, record_trial


class Schedule:
    """Queue of the trials: those of the recorded points in order, then those of new points."""

    def __init__(self, plan: SweepPlan, directory: RunDirectory) -> None:
        self._plan, self._directory = plan, directory
        recorded = read_trials(directory)
        self._points, self._ended = list(recorded.points), dict(recorded.finished)
        # A failed trial runs again when the sweep is started again, because its cause may be fixed.
        self._started = {key for key, trial in self._ended.items() if trial.status != "failed"}

    @property
    def trials(self) -> Trials:
        return Trials(tuple(self._points), dict(self._ended))

    @property
    def num_trials(self) -> int:
        return max(self._plan.num_points, len(self._points)) * len(self._plan.config.seeds)

    @property
    def num_remaining(self) -> int:
        return self.num_trials - sum(seed in self._plan.config.seeds for _, seed in self._started)

    def next_trial(self) -> tuple[Point, int] | None:
        """Return the next trial and record its point first; None after the last trial."""
        for point in self._points:
            for seed in self._plan.config.seeds:
                if (point.number, seed) not in self._started:
                    self._started.add((point.number, seed))
                    self._ended.pop((point.number, seed), None)  # a failed trial that runs again
                    return point, seed
        point = self._plan.next_point([self._tried(recorded) for recorded in self._points])
        if point is None:
            return None
        record_point(self._directory, point)
        self._points.append(point)
        return self.next_trial()

    def record(self, trial: Trial) -> None:
        """Record the outcome of a trial."""
        record_trial(self._directory, trial)
        self._ended[trial.point, trial.seed] = trial

    def _tried(self, point: Point) -> TriedPoint:
        trials = [self._ended.get((point.number, seed)) for seed in self._plan.config.seeds]
        values = [trial.value for trial in trials if trial and trial.value is not None]
        return TriedPoint(point.values, fmean(values) if values else None, all(trial is not None for trial in trials))

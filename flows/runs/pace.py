"""Pace of earlier runs, from which the duration of a run is estimated."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from mlflow import MlflowClient

from tasks.training.tracking.metrics import metric_values

_MAX_RUNS = 5  # newest runs to look at, because a run with a single timed step has no pace


class Pace(NamedTuple):
    """Pace of a finished or running run.

    Attributes:
        run_name: Name of the run.
        tokens_per_s: Tokens of the run's batches per second, without evaluations and without the first step, whose time
            includes setup.
        evaluation_s: Mean duration of an evaluation; 0 if the run had none.
    """

    run_name: str
    tokens_per_s: float
    evaluation_s: float = 0.0

    def hours(self, num_tokens: int, num_evaluations: int) -> float:
        return (num_tokens / self.tokens_per_s + num_evaluations * self.evaluation_s) / 3600

    def omits(self, num_evaluations: int) -> bool:
        """Return whether `hours` leaves out evaluations, because the run had none."""
        return num_evaluations > 0 and self.evaluation_s == 0


def find_pace(client: MlflowClient, experiment_id: str, model: str, method: str) -> Pace | None:
    """Return the pace of the newest timed run of a model and method; None if there is no such run.

    Args:
        method: name of the run's Prefect flow.
    """
    name = model.replace("'", "")
    timed = f"params.model = '{name}' and tags.`prefect.flow_name` = '{method}' and metrics.`time/step` > 0"
    for run in client.search_runs([experiment_id], timed, max_results=_MAX_RUNS):
        keys = ("num_tokens", "time/step", "time/evaluation")
        tokens, seconds, evaluations = (metric_values(client, run.info.run_id, key) for key in keys)
        later = sorted(tokens.keys() & seconds.keys())[1:]
        if total := sum(seconds[step] - evaluations.get(step, 0.0) for step in later):
            evaluation_s = fmean(evaluations.values()) if evaluations else 0.0
            name = run.info.run_name or run.info.run_id
            return Pace(name, sum(tokens[step] for step in later) / total, evaluation_s)
    return None

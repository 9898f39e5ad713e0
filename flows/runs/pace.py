"""Pace of earlier runs, from which the duration of a run is estimated."""

from __future__ import annotations

from typing import NamedTuple

from mlflow import MlflowClient

from tasks.training.metrics import metric_values

_MAX_RUNS = 5  # newest runs to look at, because a run with a single timed step has no pace


class Pace(NamedTuple):
    """Pace of a finished or running run.

    Attributes:
        run_name: Name of the run.
        tokens_per_s: Tokens of the run's batches per second, without the first step, whose time includes setup.
    """

    run_name: str
    tokens_per_s: float

    def hours(self, num_tokens: int) -> float:
        return num_tokens / self.tokens_per_s / 3600


def find_pace(client: MlflowClient, experiment_id: str, model: str, method: str) -> Pace | None:
    """Return the pace of the newest timed run of a model and method; None if there is no such run.

    Args:
        method: name of the run's Prefect flow.
    """
    name = model.replace("'", "")
    timed = f"params.model = '{name}' and tags.`prefect.flow_name` = '{method}' and metrics.`time/step` > 0"
    for run in client.search_runs([experiment_id], timed, max_results=_MAX_RUNS):
        tokens, seconds = (metric_values(client, run.info.run_id, key) for key in ("num_tokens", "time/step"))
        later = sorted(tokens.keys() & seconds.keys())[1:]
        if total := sum(seconds[step] for step in later):
            return Pace(run.info.run_name or run.info.run_id, sum(tokens[step] for step in later) / total)
    return None


def format_hours(hours: float) -> str:
    """Format a duration for people.

    >>> format_hours(0.05), format_hours(1.5)
    ('3.0 min', '1 h 30 min')
    """
    seconds = round(hours * 3600)
    return f"{seconds // 3600} h {seconds % 3600 // 60} min" if seconds >= 3600 else f"{seconds / 60:.1f} min"

"""Alerts: limits that the user sets for metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flows.config.train import AlertConfig
from tasks.training.batch_source import MetricWarning
from tasks.training.metric_names import safe_name


class Alerts:
    """Alerts of a run; each one fires once, and again only after its metric was back within the limit."""

    def __init__(self, configs: Sequence[AlertConfig]) -> None:
        self._configs = configs
        self._durations: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[MetricWarning]:
        """Check the metrics of a step; return the alerts that fire.

        A step without the metric of an alert does not change the alert's count.
        """
        fired: list[MetricWarning] = []
        counted: set[str] = set()  # alerts that differ only in their patience have one count
        for config in self._configs:
            figure = metrics.get(config.metric, metrics.get(safe_name(config.metric)))
            if figure is None:
                continue
            key = config.condition
            if key not in counted:
                self._durations[key] = self._durations.get(key, 0) + 1 if config.is_beyond(figure) else 0
                counted.add(key)
            if self._durations[key] == config.patience:
                times = f" in {config.patience} consecutive measurements" if config.patience > 1 else ""
                text = f"Alert: {config.condition}{times}, up to step {step}, where it is {figure:.4g}."
                fired.append(MetricWarning(key, step, figure, text))
        return fired

    def unmeasured(self) -> list[str]:
        """Return the conditions whose metrics no step has reported."""
        return [config.condition for config in self._configs if config.condition not in self._durations]

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint, as plain data."""
        return dict(self._durations)

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore a state; conditions that the config no longer has are dropped."""
        conditions = {config.condition for config in self._configs}
        self._durations = {key: count for key, count in state.items() if key in conditions}

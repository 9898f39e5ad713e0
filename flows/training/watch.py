"""Warnings of a run while it trains: of its terms, data and health, and of the limits that the user sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flows.config.train import AlertConfig, TrainConfig
from flows.monitoring.run_tags import note_warning, warn_of_metrics, warn_of_terms
from flows.runs.run import Run
from flows.training.preflight import warn_of_equal_rewards
from objectives.errors import did_you_mean
from objectives.objective import Objective
from tasks.training.batch_source import BatchSource, MetricWarning
from tasks.training.tracking.metric_names import logged_name, safe_name

_MANY_TRUNCATED = 0.5  # share of the candidates of a step


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
                text = f"Alert: {config.condition}{times}; {figure:.4g} at step {step}."
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


class RunWatch:
    """Warnings after each step, shown in the terminal, the log, the tags of the run and its events."""

    def __init__(
        self, run: Run, config: TrainConfig, objective: Objective, source: BatchSource, state: Mapping[str, int]
    ) -> None:
        """Create the alerts of the config.

        Args:
            state: state of the alerts in the checkpoint that the run starts from; empty for a new run.
        """
        self._run, self._config, self._objective, self._source = run, config, objective, source
        self._has_warned_of_truncation = False
        self._alerts = Alerts(config.alerts)
        self._alerts.restore(state)

    def check_step(self, step: int, metrics: Mapping[str, float], *, is_first: bool) -> None:
        """Warn of what the metrics of a step show.

        Args:
            is_first: whether this is the first step that this process runs.
        """
        self._warn_of_terms()
        for key, text in self._source.pop_warnings().items():
            note_warning(self._run.log, key, text)
        self._warn_of_metrics(step, metrics)
        if metrics.get("candidates/truncated", 0.0) > _MANY_TRUNCATED and not self._has_warned_of_truncation:
            self._has_warned_of_truncation = True
            share = f"{metrics['candidates/truncated']:.0%} of the candidates sampled at step {step}"
            text = f"{share} reached candidates.max_tokens, so scored terms see unfinished texts: raise it."
            note_warning(self._run.log, "candidates_truncated", text)
        if is_first:
            warn_of_equal_rewards(self._run, self._config, metrics)
        if step == 0:
            self._warn_of_misspelled_metrics(metrics)

    def _warn_of_misspelled_metrics(self, metrics: Mapping[str, float]) -> None:
        """Warn of configured metrics that the first step has only under a similar name; others may come later."""
        fields = {f"the alert {alert.condition}": alert.metric for alert in self._config.alerts}
        if self._config.keep_best:
            fields["keep_best"] = self._config.keep_best.metric
        for field, name in fields.items():
            question = did_you_mean(name, metrics)
            if question and logged_name(name) not in metrics and name not in metrics:
                text = f"The first step has no metric {name!r}, which {field} needs{question}"
                note_warning(self._run.log, f"metric.{safe_name(name)}", text)

    def check_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of what the evaluation after the last step shows, and of alerts that no step has measured."""
        self._warn_of_metrics(step, metrics)
        self._objective.watch.end(step)
        self._warn_of_terms()
        for condition in self._alerts.unmeasured():
            text = f"The alert {condition} had no effect, because no step reported this metric: check its name."
            note_warning(self._run.log, f"alert.{safe_name(condition)}", text)

    def state(self) -> dict[str, int]:
        """Return the state of the alerts for a checkpoint."""
        return self._alerts.state()

    def _warn_of_terms(self) -> None:
        warn_of_terms(self._run.log, self._config.run_name, self._objective.watch.pop_warnings())

    def _warn_of_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        log, name = self._run.log, self._config.run_name
        warn_of_metrics(log, name, "health", self._source.observe(step, metrics))
        warn_of_metrics(log, name, "alert", self._alerts.observe(step, metrics))

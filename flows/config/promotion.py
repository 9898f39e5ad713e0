"""Condition for promoting a checkpoint, such as `test/nll < 0.98 * baseline`.

    METRIC < | <= | > | >= NUMBER | [NUMBER *] baseline

The metric is an evaluation metric at the checkpoint's step. For a training run, the baseline is the same metric in the
run's first evaluation, before training; for `evaluate`, it is the same metric of the weights in the field `baseline`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from blocks.errors import ConfigError
from tasks.training.tracking.metric_names import logged_name

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_GATE = re.compile(
    rf"\s*(?P<metric>[A-Za-z][^<>=]*?)\s*(?P<sign><=|>=|<|>)\s*"
    rf"(?:(?P<number>{_NUMBER})|(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<baseline>baseline))\s*"
)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class PromoteIf:
    """Condition on a metric.

    Attributes:
        metric: Name of the metric in MLflow.
        sign: `<`, `<=`, `>` or `>=`.
        number: Limit of the metric, or the multiple of the baseline if `of_baseline` is set.
        of_baseline: Whether the limit is relative to the baseline.
    """

    metric: str
    sign: str
    number: float
    of_baseline: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a condition.

        >>> PromoteIf.parse("test/nll < 0.98 * baseline")
        PromoteIf(metric='test/nll', sign='<', number=0.98, of_baseline=True)
        >>> PromoteIf.parse("test/pass@1 > 0.5").metric
        'test/pass-x40-1'

        Raises:
            ValueError: The text is no valid condition.
        """
        match = _GATE.fullmatch(text)
        if not match:
            raise ValueError(
                "use METRIC, one of < <= > >=, and a number or [NUMBER *] baseline, as in test/nll < 0.98 * baseline"
            )
        number = float(match["number"] or match["factor"] or 1.0)
        if not math.isfinite(number):
            raise ValueError("use a finite number")
        return cls(logged_name(match["metric"]), match["sign"], number, match["baseline"] is not None)

    def describe(self, value: float, baseline: float | None) -> str:
        """Return the condition with the values that met it.

        >>> PromoteIf.parse("test/nll < 0.5 * baseline").describe(0.9, 2.0)
        'test/nll is 0.9 < 0.5 * 2, the baseline'
        >>> PromoteIf.parse("test/accuracy > 0.7").describe(0.75, None)
        'test/accuracy is 0.75 > 0.7'
        """
        limit = f"{self.number:g}"
        if self.of_baseline:
            factor = "" if self.number == 1 else f"{self.number:g} * "
            limit = f"{factor}{baseline:.6g}, the baseline"
        return f"{self.metric} is {value:.6g} {self.sign} {limit}"

    def rejection(self, value: float | None, baseline: float | None) -> str:
        """Return the reason not to promote a checkpoint with this metric value; empty if the condition holds.

        >>> PromoteIf.parse("test/nll < 0.5 * baseline").rejection(1.5, 2.0)
        'test/nll is 1.5, but promote_if requires < 1, which is 0.5 times the baseline 2'
        """
        if value is None or (self.of_baseline and baseline is None):
            subject = "the metric" if value is None else "its baseline"
            return f"promote_if requires {self.metric}, but {subject} was not measured"
        limit = self.number * baseline if self.of_baseline and baseline is not None else self.number
        if _COMPARE[self.sign](value, limit):
            return ""
        explanation = f", which is {self.number:g} times the baseline {baseline:.6g}" if self.of_baseline else ""
        return f"{self.metric} is {value:.6g}, but promote_if requires {self.sign} {limit:.6g}{explanation}"


def check_promote_if(text: str | None) -> str | None:
    """Validate the config field `promote_if`; None passes.

    Raises:
        ValueError: The text is no valid condition.
    """
    if text is not None:
        PromoteIf.parse(text)
    return text


def check_model_name(name: str | None) -> str | None:
    """Validate the config field `register_as`; None passes.

    Raises:
        ValueError: MLflow's registry rejects the name.
    """
    if name is not None and (not name.strip() or name == "." or name.startswith("..") or "/" in name or ":" in name):
        raise ValueError(
            "the registry of MLflow does not accept this name: use one without slashes and colons that does not start "
            "with two dots and is neither blank nor a single dot"
        )
    return name


def check_approval(needs_approval: bool, register_as: str | None) -> bool:
    """Validate the config field `needs_approval`, and return it.

    Raises:
        ValueError: The field is set, but `register_as` is not.
    """
    if needs_approval and not register_as:
        raise ValueError("it needs register_as: set the name of the registered model")
    return needs_approval


def check_confidence(promote_if: str | None, confidence: float | None) -> None:
    """Validate the config field `promote_confidence`.

    Raises:
        ValueError: The field is set, but the condition does not compare the metric with the unscaled baseline.
    """
    gate = PromoteIf.parse(promote_if) if promote_if else None
    if confidence is not None and (gate is None or not gate.of_baseline or gate.number != 1):
        raise ValueError(
            "promote_confidence requires a condition such as test/NAME > baseline, because it tests whether "
            "checkpoint and baseline have equal scores: change promote_if, or remove promote_confidence"
        )


def check_measured(field: str, metric: str, metrics: Mapping[str, float]) -> None:
    """Check that the evaluations measure the metric that a config field names.

    Raises:
        ConfigError: No evaluation measures the metric.
    """
    if metric not in metrics:
        raise ConfigError(
            f"{field} requires {metric}, which no evaluation measures; use one of {', '.join(sorted(metrics))}, or "
            "add the evaluator that measures it."
        )

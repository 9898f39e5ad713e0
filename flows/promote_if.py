"""The gate before a promotion: `test/nll < 0.98 * baseline`.

    METRIC < | <= | > | >= NUMBER | [NUMBER *] baseline

The metric is one of an evaluation, taken at the checkpoint that is to be promoted. The baseline is the same metric of
the run's first evaluation, which is before its training.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from blocks.errors import ConfigError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_GATE = re.compile(
    rf"\s*(?P<metric>[A-Za-z][\w./:-]*)\s*(?P<sign><=|>=|<|>)\s*"
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
    """A condition on a metric.

    Attributes:
        metric: its name.
        sign: `<`, `<=`, `>` or `>=`.
        factor: what the metric is compared with: this, or so many times the baseline.
        of_baseline: whether the baseline counts.
    """

    metric: str
    sign: str
    factor: float
    of_baseline: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a condition.

        >>> PromoteIf.parse("test/nll < 0.98 * baseline")
        PromoteIf(metric='test/nll', sign='<', factor=0.98, of_baseline=True)

        Raises:
            ValueError: it is none.
        """
        found = _GATE.fullmatch(text)
        if not found:
            raise ValueError(
                "give a metric, one of < <= > >=, and a number or `baseline`, which may be multiplied, as in "
                "test/nll < 0.98 * baseline"
            )
        number = float(found["number"] or found["factor"] or 1.0)
        if not math.isfinite(number):
            raise ValueError("give a number that is finite")
        return cls(found["metric"], found["sign"], number, found["baseline"] is not None)

    def refusal(self, value: float | None, baseline: float | None) -> str:
        """Why a checkpoint with this value of the metric is not promoted; empty where it is.

        >>> PromoteIf.parse("test/nll < 0.5 * baseline").refusal(1.5, 2.0)
        'test/nll is 1.5, and promote_if asks for < 1, which is 0.5 times the baseline 2'
        """
        if value is None or (self.of_baseline and baseline is None):
            what = "it" if value is None else "its baseline"
            return f"promote_if asks for {self.metric}, and {what} was not measured"
        limit = self.factor * baseline if self.of_baseline and baseline is not None else self.factor
        if _COMPARE[self.sign](value, limit):
            return ""
        of = f", which is {self.factor:g} times the baseline {baseline:.6g}" if self.of_baseline else ""
        return f"{self.metric} is {value:.6g}, and promote_if asks for {self.sign} {limit:.6g}{of}"


def check_promote_if(text: str | None) -> str | None:
    """A config's field: a condition, or none.

    Raises:
        ValueError: it is no condition.
    """
    if text is not None:
        PromoteIf.parse(text)
    return text


def check_measured(promote_if: str | None, metrics: Mapping[str, float]) -> None:
    """Refuse a condition on what an evaluation does not measure, at its first one.

    Raises:
        ConfigError: there is no such metric.
    """
    if promote_if and (metric := PromoteIf.parse(promote_if).metric) not in metrics:
        raise ConfigError(
            f"promote_if asks for {metric}, which no evaluation measures; there are {', '.join(sorted(metrics))}: name "
            "one of them, or add the evaluator that measures it."
        )

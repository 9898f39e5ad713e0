"""Prometheus metrics of the front and of its engines as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class FrontMetrics:
    """Counter, by status, of the responses that the front sends: those of the engines and its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = Counter(
            "tinker_front_http_responses",
            "Responses of the front by status, including those of the engines.",
            ("status",),
            registry=self._registry,
        )

    def count_response(self, route: str, status: int) -> None:
        """Count a response by its status; the protocol `ResponseCounter` requires `route`, which is unused here."""
        self._http.labels(str(status)).inc()

    def text(self, engines: Mapping[int, str]) -> bytes:
        """Return the front's metrics, followed by the merged metrics of the engines.

        Args:
            engines: text of each engine's metrics, by the number of the engine.
        """
        return generate_latest(self._registry) + merge_metrics(engines)


def merge_metrics(texts: Mapping[int, str]) -> bytes:
    """Merge the metrics of engines; the label ``engine`` has the number of the engine.

    >>> print(merge_metrics({0: "# HELP a b\\n# TYPE a gauge\\na 1.0\\n", 1: "a 2.0\\n"}).decode(), end="")
    # HELP a b
    # TYPE a gauge
    a{engine="0"} 1.0
    a{engine="1"} 2.0
    """
    merged: dict[str, Metric] = {}
    for number, text in texts.items():
        for metric in text_string_to_metric_families(text):
            family = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.add_sample(sample.name, {"engine": str(number), **sample.labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged(merged))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.values()

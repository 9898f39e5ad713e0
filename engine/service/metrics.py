"""Metrics of the running engine in the Prometheus format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(slots=True)
class Timing:
    """Timed operation; the caller sets `failed` if the operation fails."""

    failed: bool = False


class Metrics:
    """Counters and timings. Gauges are read from the engine on every scrape."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """Register the metrics.

        Args:
            gauges: returns the current values by the names in `GAUGES`.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(gauges))
        self._operations = Histogram(
            "tinker_engine_operation_seconds",
            "Time of a training operation, from its start to its response.",
            ("kind", "outcome"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "tinker_engine_tokens", "Tokens trained on, forwarded or sampled.", ("use",), registry=self._registry
        )
        self._http = Counter(
            "tinker_engine_http_responses",
            "Responses by route and status.",
            ("route", "status"),
            registry=self._registry,
        )

    @contextmanager
    def timing(self, kind: str) -> Iterator[Timing]:
        """Time the block as an operation of ``kind``."""
        timing = Timing()
        started = time.perf_counter()
        yield timing
        outcome = "failed" if timing.failed else "done"
        self._operations.labels(kind, outcome).observe(time.perf_counter() - started)

    def count_tokens(self, use: Literal["trained", "forwarded", "prompt", "sampled"], count: int) -> None:
        self._tokens.labels(use).inc(count)

    def count_response(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


# Read from the engine at every scrape; evictions, prefill tokens and busy seconds are totals since the start.
GAUGES = {
    "sessions": "Open sessions.",
    "models": "Models in training.",
    "samplers": "Samplers of the open sessions.",
    "waiting_requests": "Training requests in queues.",
    "running_requests": "Training requests in progress.",
    "adapter_bytes": "Memory of adapters, moments, gradients and snapshots.",
    "evictions": "Evictions from memory to disk.",
    "prefill_tokens_requested": "Tokens to prefill, before sharing: the tokens of each sample when it joins the batch, "
    "and again when it resumes after a suspension.",
    "prefill_tokens_computed": "Tokens computed for these samples; equal beginnings of prompts are computed once.",
    "busy_seconds": "Time spent computing training and sampling.",
    "resident_bytes": "Resident memory of the process.",
}


class _Gauges(Collector):
    def __init__(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._gauges = gauges

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self._gauges()
        for name, help_text in GAUGES.items():
            yield GaugeMetricFamily(f"tinker_engine_{name}", help_text, value=values[name])

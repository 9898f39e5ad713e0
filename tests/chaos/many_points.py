"""Evaluator with more metrics than MLflow stores in one write."""

from __future__ import annotations

import tinker
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator

NUM_POINTS = 2000


class ManyPoints(SamplingClientEvaluator):
    """Evaluator that returns `NUM_POINTS` constant metrics."""

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        return {f"many/{number:04d}": float(number) for number in range(NUM_POINTS)}

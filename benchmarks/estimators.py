"""Gradients of `score_function` and `minimum_risk`, against the exact gradient of a toy model's expected score.

The toy's sequences can be enumerated (`benchmarks.toy_sequences`). All scores of the first prompt get an offset, those
of the second twice as much, which must not matter. The peer is the estimator of release 0.1, which compared the
completions of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.toy_sequences import (
    NUM_PROMPTS,
    SEQUENCES,
    draw_logits,
    expected_score_gradient,
    make_case,
    sample_rows,
    scores_of,
)
from objectives.estimators import batch_risk, minimum_risk, score_function

OFFSETS = (0.0, 1.0, 5.0)
NUM_SAMPLES = 128  # of each prompt in a batch


def measure(*, num_batches: int = 40) -> Table:
    """Return cosine and ratio of norms to the exact gradient, by estimator, data and offset.

    Args:
        num_batches: batches of samples whose estimates are averaged.
    """
    on_policy = draw_logits(0)
    stale = on_policy + 0.3 * draw_logits(1)
    table = Table(title="Estimated against exact gradient of the expected score", title_justify="left")
    for column in ("estimator", "data", "offset", "cosine", "ratio of norms"):
        table.add_column(column, justify="right" if column not in ("estimator", "data") else "left")
    exact = expected_score_gradient(on_policy)
    for offset in OFFSETS:
        for name, estimator in (("minimum_risk", minimum_risk), ("of release 0.1", batch_risk)):
            _add(table, name, "all sequences", offset, _over_all(on_policy, estimator, offset), exact)
        for data, sampler in (("on-policy samples", on_policy), ("stale samples", stale)):
            estimate = _over_samples(on_policy, sampler, offset, num_batches)
            _add(table, "score_function", data, offset, estimate, exact)
    return table


def _add(table: Table, name: str, data: str, offset: float, estimate: Tensor, exact: Tensor) -> None:
    flat, reference = estimate.flatten(), exact.flatten()
    cosine = float(flat @ reference / flat.norm() / reference.norm())
    table.add_row(name, data, f"{offset:g}", f"{cosine:.4f}", f"{float(flat.norm() / reference.norm()):.3f}")


def _over_all(logits: Tensor, estimator: Callable[..., Tensor], offset: float) -> Tensor:
    logits = logits.clone().requires_grad_()
    rows = [(prompt, sequence) for prompt in range(NUM_PROMPTS) for sequence in SEQUENCES]
    batch, outputs = make_case(logits, None, rows)
    return torch.autograd.grad(estimator(outputs, batch, scores_of(rows, offset)), logits)[0]


def _over_samples(logits: Tensor, sampler: Tensor, offset: float, num_batches: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros_like(logits)
    for _ in range(num_batches):
        rows = sample_rows(sampler, generator, NUM_SAMPLES)
        current = logits.clone().requires_grad_()
        batch, outputs = make_case(current, sampler, rows)
        value = score_function(outputs, batch, scores_of(rows, offset))
        total += torch.autograd.grad(value, current)[0] / num_batches
    return total

"""The last word on every term of a run, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TermRow:
    """What one term came to, at the last step that evaluated it. Norms and shares are those of its gradient."""

    name: str
    value: float
    weight: float
    contribution: float
    grad_share: float
    cosine_to_base: float


COLUMNS = ("term", "value", "weight", "contribution", "share of gradient", "cosine to base")


def term_rows(metrics: Mapping[str, float]) -> list[TermRow]:
    """One row per term in `term/<name>/...` metrics, the base loss first."""
    names = sorted({key.split("/")[1] for key in metrics if key.startswith("term/") and key.endswith("/weight")})
    names.sort(key=lambda name: name != "base")
    fields = ("value", "weight", "contribution", "grad_share", "cosine_to_base")
    return [TermRow(name, *(metrics.get(f"term/{name}/{field}", float("nan")) for field in fields)) for name in names]


def cells(row: TermRow) -> tuple[str, ...]:
    """A row as text, in the order of `COLUMNS`."""
    return (
        row.name,
        f"{row.value:.4g}",
        f"{row.weight:.4g}",
        f"{row.contribution:.4g}",
        f"{row.grad_share:.1%}",
        f"{row.cosine_to_base:+.3f}",
    )

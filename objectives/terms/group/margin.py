"""Margin between paired datums: the first datum of a pair should be likelier than the second."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.labels import find_pairs
from objectives.reductions import mean_by_datum
from objectives.term import regularizer


@regularizer("margin", reduction="none")
def margin(
    outputs: Outputs, batch: Batch, *, margin: Annotated[float, Field(ge=0)] = 1.0, label: str = "pair"
) -> tuple[Tensor, dict[str, float]]:
    """Hinge loss ``max(0, margin - (m_first - m_second))``, nats, mean over the pairs, 0-d; m is a mean logprob.

    The datums of a pair have the same label (`objectives.labels`), and the better one comes first in the batch. A
    pair that meets the margin has no gradient.

    Source: the rank loss of Weston & Watkins 1999, "Support Vector Machines for Multi-Class Pattern Recognition", as
    used for sequences by Zhao et al. 2023, "SLiC-HF" (arXiv:2305.10425), equation 1, per token.

    Args:
        margin: nats per token.
        label: name of the label that the datums of a pair share.

    Metrics:
        gap: mean of ``m_first - m_second``, nats; kept: share of pairs that meet the margin.

    >>> labels_D = {"pair": torch.tensor([1, 1])}
    >>> batch = Batch(torch.tensor([5, 5]), torch.ones(2), torch.tensor([0, 1, 2]), labels_D=labels_D)
    >>> margin(Outputs(torch.tensor([-1.0, -1.5])), batch)
    (tensor(0.5000), {'gap': 0.5, 'kept': 0.0})
    """
    pairs = find_pairs(batch, label)
    means_D = mean_by_datum(outputs.logprobs_DT, batch)
    gap_P = means_D[pairs.first_P] - means_D[pairs.second_P]
    shortfall_P = (margin - gap_P).clamp(min=0)
    return shortfall_P.mean(), {
        "gap": float(gap_P.detach().mean()),
        "kept": float((shortfall_P.detach() == 0).to(torch.float64).mean()),
    }

"""Orthogonality between the sequences of a batch: they should not all say the same."""

from __future__ import annotations

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.reductions import refuse_several_targets, trained_datums
from objectives.term import regularizer

# Of the squared length of a sequence whose probabilities are all 0 in floating point.
_LEAST_SQUARE = 1e-12


@regularizer("orthogonality", reduction="none")
def orthogonality(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Squared cosine between two sequences, mean over all pairs of sequences in the batch, 0-d, in [0, 1].

    A sequence is the vector over the vocabulary that has the probabilities of its trained targets, each at its token's
    place, added up. Two sequences without a common token are orthogonal; what is minimised is the probability of the
    tokens that sequences share, relative to those that are their own.

    Source: the double soft orthogonality of Bansal et al. 2018, "Can We Gain More from Orthogonality Regularizations in
    Training Deep Networks?" (arXiv:1810.09102), on normalized outputs in place of weights.

    Metrics:
        cosine_mean, cosine_max: over the pairs.

    >>> batch = Batch(torch.tensor([5, 6, 5]), torch.ones(3), torch.tensor([0, 2, 3]))
    >>> value, _ = orthogonality(Outputs(torch.tensor([0.5, 0.5, 0.9]).log()), batch)
    >>> round(value.item(), 4)
    0.5
    """
    refuse_several_targets(batch)
    kept = trained_datums(batch).nonzero()[:, 0]
    if len(kept) < 2:
        raise ObjectiveError("one sequence has no other to be orthogonal to: give batches of at least two datums")
    trained_DT = batch.mask_DT
    tokens, place_T = batch.target_tokens_DT[trained_DT].unique(return_inverse=True)
    row_T = torch.searchsorted(kept, batch.datum_of_DT[trained_DT])
    # float64, since a matrix product may round differently from run to run: below what float32 shows.
    probabilities_T = outputs.logprobs_DT[trained_DT].double().exp()
    vectors_DV = torch.zeros(len(kept), len(tokens), dtype=torch.float64)
    vectors_DV = vectors_DV.index_put((row_T, place_T), probabilities_T, accumulate=True)
    squares_D = vectors_DV.square().sum(-1).clamp(min=_LEAST_SQUARE)
    vectors_DV = vectors_DV / squares_D.sqrt()[:, None]
    one, other = torch.triu_indices(len(kept), len(kept), offset=1)
    cosines_P = (vectors_DV @ vectors_DV.T)[one, other]
    shown_P = cosines_P.detach()
    return cosines_P.square().mean().to(outputs.logprobs_DT.dtype), {
        "cosine_mean": float(shown_P.mean()),
        "cosine_max": float(shown_P.max()),
    }

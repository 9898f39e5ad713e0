"""Orthogonality between the sequences of a batch, for diversity."""

from __future__ import annotations

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.reductions import check_single_target, trained_datums
from objectives.term import regularizer


@regularizer("orthogonality", reduction="none")
def orthogonality(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Squared cosine between two sequences, mean over all pairs of sequences in the batch, 0-d, in [0, 1].

    The vector of a sequence has one component per vocabulary token: the sum of the probabilities of the trained targets
    with this token. Sequences without a common token are orthogonal. Minimization lowers the probability of shared
    tokens relative to other tokens.

    Source: the double soft orthogonality of Bansal et al. 2018, "Can We Gain More from Orthogonality Regularizations in
    Training Deep Networks?" (arXiv:1810.09102), on normalized outputs instead of weights.

    Metrics:
        cosine_mean, cosine_max: mean and maximum cosine of a pair.

    >>> batch = Batch(torch.tensor([5, 6, 5]), torch.ones(3), torch.tensor([0, 2, 3]))
    >>> value, _ = orthogonality(Outputs(torch.tensor([0.5, 0.5, 0.9]).log()), batch)
    >>> round(value.item(), 4)
    0.5
    """
    check_single_target(batch)
    datums = trained_datums(batch).nonzero()[:, 0]
    if len(datums) < 2:
        raise ObjectiveError(
            f"the batch has {len(datums)} datums with trained tokens, but a pair needs two; use larger batches"
        )
    trained_DT = batch.mask_DT
    tokens, column_T = batch.target_tokens_DT[trained_DT].unique(return_inverse=True)
    row_T = torch.searchsorted(datums, batch.datum_of_DT[trained_DT])
    # float64 keeps run-to-run rounding differences of the matrix product below the precision of float32.
    probabilities_T = outputs.logprobs_DT[trained_DT].double().exp()
    vectors_DV = torch.zeros(len(datums), len(tokens), dtype=torch.float64)
    vectors_DV = vectors_DV.index_put((row_T, column_T), probabilities_T, accumulate=True)
    squares_D = vectors_DV.square().sum(-1)
    squares_D = squares_D.where(squares_D > 0, 1.0)  # a sequence whose probabilities underflow keeps the vector 0
    vectors_DV = vectors_DV / squares_D.sqrt()[:, None]
    first, second = torch.triu_indices(len(datums), len(datums), offset=1)
    cosines_P = (vectors_DV @ vectors_DV.T)[first, second]
    detached_P = cosines_P.detach()
    return cosines_P.square().mean().to(outputs.logprobs_DT.dtype), {
        "cosine_mean": float(detached_P.mean()),
        "cosine_max": float(detached_P.max()),
    }

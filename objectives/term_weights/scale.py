"""Scale of a batch: what a weight of 1 means, whatever the batch size, the lengths and the number of minibatches.

The services train on sums, so the base loss of a batch grows with it, while a term is a mean. An objective therefore
multiplies each term by the size of the base loss, and the sum of all gradients is::

    S * d/dlogprobs [base / S + sum_k weight_k value_k * (scale_k / S)]

``S`` is the sum of the absolute weights of the base loss; it is the number of trained tokens if all weights are 1, as
in supervised training and in reinforcement learning. The scale of a term is S if its gradient at one token shrinks with
the number of tokens (``unit="token"``): a term that is a mean over tokens compares with the base loss per token. It is
``S D / N``, for ``D`` sequences of ``N`` tokens, if its gradient at one token shrinks with the number of sequences
(``unit="sequence"``), as for an expected score per completion: such a term compares with the base loss per sequence.
In both cases, term and base loss are balanced at each token, so a term's share of the gradient depends neither on the
number of sequences nor on their length. A base loss that is itself a mean is multiplied only by the batch's share of
its update, and the scales of the terms are reduced to match.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from objectives.batch import Batch
from objectives.estimators import ESTIMATORS
from objectives.evaluate import estimator_of
from objectives.reductions import trained_datums
from objectives.term import Regularizer, Unit


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors of the terms of one batch.

    Attributes:
        base: factor of the base loss: 1, the share of the minibatch if the base loss is a mean, or 0 for candidates and
            for batches on which only terms train.
        size: S, or the share of the minibatch if the base loss is a mean, or 0 for candidates. The metrics of the total
            loss are divided by the size.
        token: scale of terms with the unit ``"token"``.
        sequence: scale of terms with the unit ``"sequence"``.
        plain: scale of terms that are sums; they grow with the batch as the base loss does.
    """

    base: float
    size: float
    token: float
    sequence: float
    plain: float = 1.0

    def of(self, regularizer: Regularizer, batch: Batch) -> float:
        """Return the scale of a term."""
        if regularizer.adds_up:
            return self.plain
        return self.sequence if unit_of(regularizer, batch) == "sequence" else self.token


def candidate_scale(supervised: Scale) -> Scale:
    """Return the scale of candidates sampled for the prompts of a supervised batch.

    It is the scale of the supervised batch, so a score has the same strength relative to the supervised data for any
    number of candidates. Candidates have no base loss, and terms that are sums do not train on them.
    """
    return replace(supervised, base=0.0, size=0.0, plain=0.0)


UNSCALED = Scale(base=1.0, size=1.0, token=1.0, sequence=1.0)
"""Scale under which weights are plain factors."""


def compute_scale(base: Regularizer | None, batch: Batch, share: float = 1.0) -> Scale:
    """Compute the scale of a batch.

    Args:
        base: the base loss of the objective; ``None`` for cross_entropy.
        share: share of the batch in its update: one over the number of minibatches.

    >>> import torch
    >>> batch = Batch(torch.zeros(6).long(), torch.ones(6), torch.tensor([0, 2, 6]))
    >>> compute_scale(None, batch)
    Scale(base=1.0, size=6.0, token=6.0, sequence=2.0, plain=1.0)
    """
    num_tokens, num_datums = float(batch.mask_DT.sum()), float(trained_datums(batch).sum())
    if base is None:
        size = float(batch.weights_DT.abs().sum())
        return Scale(1.0, size, token=size, sequence=size * num_datums / num_tokens)
    if base.adds_up:
        return Scale(1.0, num_tokens, token=num_tokens, sequence=num_datums)
    if unit_of(base, batch) == "sequence":
        return Scale(share, share, token=share * num_tokens / num_datums, sequence=share)
    return Scale(share, share, token=share, sequence=share * num_datums / num_tokens)


def plain_scale(base: Regularizer | None, share: float = 1.0) -> Scale:
    """Return the scale of runs that release 0.1 started, whose terms are not scaled."""
    base_scale = 1.0 if base is None or base.adds_up else share
    return Scale(base_scale, share, token=share, sequence=share)


def unit_of(regularizer: Regularizer, batch: Batch) -> Unit:
    """Return the unit of a term; for a scored term, the unit of its estimator."""
    if regularizer.term.kind != "scored":
        return regularizer.term.unit
    return ESTIMATORS[estimator_of(regularizer, batch)].unit


def gain_unit(
    regularizer: Regularizer, base: Regularizer | None, batch: Batch, supervised: Batch | None = None
) -> float:
    """Return the factor that gives equal multipliers of a target equal strength: the unit of the target's gains.

    T is the mean number of trained tokens of the sequences that the base loss trains: those of ``supervised`` if the
    batch has sampled candidates for its prompts. The unit is:

    - T for a term with the unit ``"sequence"`` next to a loss per token, such as cross-entropy: it competes with the
      loss of a whole sequence;
    - 1/T for a term with the unit ``"token"`` next to a loss per sequence, such as ``dpo``;
    - 1 for equal units, for a term with the reduction ``sum``, and next to a policy loss, in which every token has the
      advantage of a whole completion.
    """
    is_policy_loss = base is not None and "advantages" in base.term.needs
    if regularizer.adds_up or is_policy_loss:
        return 1.0
    data = supervised or batch
    base_unit = "token" if base is None else unit_of(base, data)
    unit = unit_of(regularizer, batch)
    if unit == base_unit:
        return 1.0
    num_tokens = float(data.mask_DT.sum() / trained_datums(data).sum())
    return num_tokens if unit == "sequence" else 1 / num_tokens

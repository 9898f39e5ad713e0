"""Group fairness: equal losses or acceptance rates for all groups of datums.

The group of a datum is a label of the data (`objectives.labels`); datums without the label are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.labels import NONE, get_label
from objectives.reductions import mean_by_datum, sum_by_datum, trained_datums
from objectives.term import regularizer


@regularizer("equalized_loss", reduction="none")
def equalized_loss(
    outputs: Outputs, batch: Batch, *, label: str = "group", names: tuple[str, ...] = ()
) -> tuple[Tensor, dict[str, float]]:
    """Gap between the highest and the lowest mean loss of a group, nats per token, 0-d.

    The loss of a datum is ``-mean log p`` of its trained tokens; the loss of a group is the mean over its datums.

    Source: equal risk across groups, as in Donini et al. 2018, "Empirical Risk Minimization under Fairness Constraints"
    (arXiv:1802.08626).

    Args:
        label: name of the label that contains the group's number.
        names: names of the groups 0, 1, ... for the metrics; the numbers by default.

    Metrics:
        loss_<group>: mean loss of each group in the batch.

    >>> labels_D = {"group": torch.tensor([0, 1, 1])}
    >>> batch = Batch(torch.tensor([5, 5, 5]), torch.ones(3), torch.tensor([0, 1, 2, 3]), labels_D=labels_D)
    >>> equalized_loss(Outputs(torch.tensor([-1.0, -2.0, -4.0])), batch, names=("old", "new"))
    (tensor(2.), {'loss_old': 1.0, 'loss_new': 3.0})
    """
    losses_G, groups = _mean_by_group(-mean_by_datum(outputs.logprobs_DT, batch), batch, label)
    return _gap(losses_G, label), _metrics("loss", losses_G, groups, names)


@regularizer("worst_group", reduction="none")
def worst_group(
    outputs: Outputs, batch: Batch, *, label: str = "group", names: tuple[str, ...] = ()
) -> tuple[Tensor, dict[str, float]]:
    """Highest mean loss of a group, nats per token, 0-d; only this group has a gradient.

    Source: Sagawa et al. 2020, "Distributionally Robust Neural Networks for Group Shifts" (arXiv:1911.08731),
    equation 4.

    Args:
        label: name of the label that contains the group's number.
        names: names of the groups 0, 1, ... for the metrics; the numbers by default.

    Metrics:
        loss_<group>: mean loss of each group in the batch.

    >>> labels_D = {"group": torch.tensor([0, 1])}
    >>> batch = Batch(torch.tensor([5, 5]), torch.ones(2), torch.tensor([0, 1, 2]), labels_D=labels_D)
    >>> worst_group(Outputs(torch.tensor([-1.0, -2.0])), batch)
    (tensor(2.), {'loss_0': 1.0, 'loss_1': 2.0})
    """
    losses_G, groups = _mean_by_group(-mean_by_datum(outputs.logprobs_DT, batch), batch, label)
    return losses_G.max(), _metrics("loss", losses_G, groups, names)


@regularizer("demographic_parity", reduction="none", unit="sequence")
def demographic_parity(
    outputs: Outputs, batch: Batch, *, label: str = "group", names: tuple[str, ...] = ()
) -> tuple[Tensor, dict[str, float]]:
    """Gap between the highest and the lowest acceptance rate of a group, 0-d, in [0, 1].

    Each datum trains the accepting completion, such as "yes"; the rate of a group is its mean probability
    ``exp(sum log p)``. Keep the completion to one or two words, because a long completion always has a low probability.

    Source: statistical parity, Dwork et al. 2012, "Fairness Through Awareness" (arXiv:1104.3913), applied to
    probabilities instead of decisions, so that it is differentiable.

    Args:
        label: name of the label that contains the group's number.
        names: names of the groups 0, 1, ... for the metrics; the numbers by default.

    Metrics:
        rate_<group>: acceptance rate of each group in the batch.

    >>> labels_D = {"group": torch.tensor([0, 1])}
    >>> batch = Batch(torch.tensor([5, 5]), torch.ones(2), torch.tensor([0, 1, 2]), labels_D=labels_D)
    >>> demographic_parity(Outputs(torch.tensor([0.75, 0.25]).log()), batch)
    (tensor(0.5000), {'rate_0': 0.75, 'rate_1': 0.25})
    """
    rates_G, groups = _mean_by_group(sum_by_datum(outputs.logprobs_DT, batch).exp(), batch, label)
    return _gap(rates_G, label), _metrics("rate", rates_G, groups, names)


def _mean_by_group(values_D: Tensor, batch: Batch, label: str) -> tuple[Tensor, list[int]]:
    """Return the mean of each group in the batch, ``(G,)``, and the numbers of these groups."""
    label_D = get_label(batch, label)
    counted_D = trained_datums(batch) & (label_D != NONE)
    if not bool(counted_D.any()):
        raise ObjectiveError(
            f"no datum of the batch has both a label {label!r} and a trained token; label the datums with their group, "
            "numbered from 0"
        )
    groups, group_of_D = label_D[counted_D].unique(return_inverse=True)
    means = [values_D[counted_D][group_of_D == group].mean() for group in range(len(groups))]
    return torch.stack(means), groups.tolist()


def _gap(values_G: Tensor, label: str) -> Tensor:
    if len(values_G) < 2:
        raise ObjectiveError(
            f"all trained datums with the label {label!r} are in one group, but a gap needs two; mix the groups in "
            "each batch, or skip the term for such batches with on_error='skip'"
        )
    return values_G.max() - values_G.min()


def _metrics(prefix: str, values_G: Tensor, groups: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    group_names = (names[group] if 0 <= group < len(names) else str(group) for group in groups)
    return dict(zip((f"{prefix}_{name}" for name in group_names), values_G.detach().tolist(), strict=True))

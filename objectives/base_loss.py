"""Policy losses, those of the service and those of the client alone, as base losses of an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError, UntraceableError
from objectives.losses import BUILT_IN, BuiltInLoss, find_base_loss
from objectives.one_datum import OneDatum
from objectives.reductions import sum_by_datum
from objectives.term import Need, NoParams, Term

# Where an input of a loss is found, by its name among those that a term may need.
_NEEDS: dict[str, Need] = {**{each: each for each in get_args(Need)}, "logprobs": "sampling_logprobs"}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss over the trained tokens; called as a term is.

    A weight of 0 leaves a token out of everything, the sequence ratio of gspo, the penalty of dro and the lengths of
    grpo included; the size of the others plays no part, as on the service.

    Metrics:
        ratio_mean, ratio_max, kl_k1: see `objectives.losses.RatioMetrics`; means over datums.
        clip_fraction: the same, of a loss that clips.
        what the loss explains of itself, such as the entropy of enhanced_ppo.
    """

    loss: BuiltInLoss
    params: Mapping[str, float]

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple(_NEEDS[name] for name in self.loss.needed(self.params) if name in _NEEDS)

    @property
    def adds_up(self) -> bool:
        """Whether it is a sum over the datums, as the service's losses are."""
        return self.loss.name in BUILT_IN

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        if outputs.logprobs_DT.ndim != 1:
            raise ObjectiveError("it takes one target at each position: only cross_entropy and callables take several")
        inputs = self._trained(outputs, batch)
        lengths_D = sum_by_datum(torch.ones(batch.num_tokens), batch).long()
        offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)])
        logprobs_DT = outputs.logprobs_DT[batch.mask_DT]
        watched = self.loss.compute_metrics(logprobs_DT, inputs, offsets_D, self.params)
        metrics = {
            "ratio_mean": watched.mean_D.mean().item(),
            "ratio_max": watched.max_D.max().item(),
            "kl_k1": watched.kl_k1_D.mean().item(),
        }
        if self.loss.clips:
            metrics["clip_fraction"] = watched.clip_fraction_D.mean().item()
        explained = self.loss.explained(logprobs_DT, inputs, offsets_D, self.params)
        return self.loss.compute(logprobs_DT, inputs, offsets_D, self.params), metrics | explained

    def of_one(self, outputs: Outputs, datum: OneDatum) -> Tensor:
        """The loss of one datum, 0-d; those of a batch add up to the batch's.

        Raises:
            UntraceableError: a loss of the client that is no sum over the datums.
        """
        if not self.adds_up:
            raise UntraceableError(f"the loss {self.loss.name!r} is no sum over datums")
        return self.loss.compute(outputs.logprobs_DT[datum.mask_DT], self._trained(outputs, datum), None, self.params)

    def _trained(self, outputs: Outputs, batch: Batch | OneDatum) -> dict[str, Tensor]:
        """What the loss reads of the trained tokens."""
        inputs: dict[str, Tensor] = {}
        for name in self.loss.needed(self.params):
            if name in _NEEDS:
                field = f"{_NEEDS[name]}_DT"
                value_DT = getattr(outputs if hasattr(outputs, field) else batch, field)
                assert value_DT is not None, "held by needs"
            else:  # sequence_ratio_mask: of the trained tokens all were sampled
                value_DT = torch.ones_like(batch.weights_DT)
            inputs[name] = value_DT[batch.mask_DT]
        return inputs


def policy_loss_term(name: str, params: Mapping[str, object]) -> Term:
    """A differentiable term that is a `PolicyLoss`.

    Raises:
        ObjectiveError: an unknown or a wrong parameter.
    """
    loss = find_base_loss(name)
    evaluate = PolicyLoss(loss, loss.check_params(params))
    return Term(name, "differentiable", evaluate, None, "none", None, NoParams, evaluate.needs)

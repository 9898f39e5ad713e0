"""Adapter that lets policy losses, from the service or the client, serve as the base loss of an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError, UntraceableError
from objectives.losses import BUILT_IN, BuiltInLoss, find_base_loss
from objectives.losses.policy.correction import Correction
from objectives.proxies import OneDatum
from objectives.reductions import sum_by_datum
from objectives.term import Need, NoParams, Term

# Need (the name of a field of `Outputs` or `Batch`) that supplies each input of a loss.
_NEEDS: dict[str, Need] = {**{need: need for need in get_args(Need)}, "logprobs": "sampling_logprobs"}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy loss over the trained tokens, with the call signature of a term.

    Tokens of weight 0 are excluded from all computations, including the sequence ratio of gspo, the penalty of dro and
    the lengths of grpo. As on the service, only whether a weight is zero matters, not its size.

    Metrics:
        ratio_mean, ratio_max, kl_k1: see `objectives.losses.RatioMetrics`; means over datums, except ratio_max, which
            is the maximum over datums.
        clip_fraction: share of tokens whose ratio is outside the bounds, mean over datums; only for losses that
            clip.
        masked, factor_mean: with a correction, the share of tokens of non-zero advantage that it drops, and the mean of
            its factors over these tokens.
        additional metrics of the loss, such as the entropy of enhanced_ppo.

    Attributes:
        correction: correction between sampler and trainer; None for none.
    """

    loss: BuiltInLoss
    params: Mapping[str, float]
    correction: Correction | None = None

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple(_NEEDS[name] for name in self.loss.required_inputs(self.params) if name in _NEEDS)

    @property
    def adds_up(self) -> bool:
        """True if the loss grows with the batch, so that minibatches add up to it; false for a mean."""
        return self.loss.reduction == "sum"

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        if outputs.logprobs_DT.ndim != 1:
            raise ObjectiveError(
                f"the loss {self.loss.name!r} takes one target per position; use cross_entropy for several "
                "targets per position"
            )
        inputs = self._trained(outputs, batch)
        lengths_D = sum_by_datum(torch.ones(batch.num_tokens), batch).long()
        offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)])
        logprobs_DT = outputs.logprobs_DT[batch.mask_DT]
        ratios = self.loss.compute_metrics(logprobs_DT, inputs, offsets_D, self.params)
        metrics = {
            "ratio_mean": ratios.mean_D.mean().item(),
            "ratio_max": ratios.max_D.max().item(),
            "kl_k1": ratios.kl_k1_D.mean().item(),
        }
        inputs, factors_DT = self._corrected(logprobs_DT, inputs, batch, offsets_D)
        if factors_DT is not None:
            metrics |= _correction_metrics(factors_DT, batch)
            ratios = self.loss.compute_metrics(logprobs_DT, inputs, offsets_D, self.params)
        if self.loss.clips:
            metrics["clip_fraction"] = ratios.clip_fraction_D.mean().item()
        extra_metrics = self.loss.compute_extra_metrics(logprobs_DT, inputs, offsets_D, self.params)
        return self.loss.compute(logprobs_DT, inputs, offsets_D, self.params), metrics | extra_metrics

    def compute_datum(self, outputs: Outputs, datum: OneDatum) -> Tensor:
        """Compute the loss of one datum, 0-d.

        Raises:
            UntraceableError: the service does not know the loss.
        """
        if self.loss.name not in BUILT_IN:
            raise UntraceableError(f"the loss {self.loss.name!r} is computed on whole batches")
        logprobs_T = outputs.logprobs_DT[datum.mask_DT]
        inputs, _ = self._corrected(logprobs_T, self._trained(outputs, datum), datum, None)
        return self.loss.compute(logprobs_T, inputs, None, self.params)

    def _corrected(
        self, logprobs_DT: Tensor, inputs: dict[str, Tensor], batch: Batch | OneDatum, offsets_D: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the inputs with corrected advantages, and the factors of the correction."""
        if self.correction is None:
            return inputs, None
        sampling_DT, advantages_DT = inputs["logprobs"], inputs["advantages"]
        untempered_DT = batch.untempered_logprobs_DT if self.correction.reads_snapshot else None
        snapshot_DT = None if untempered_DT is None else untempered_DT[batch.mask_DT]
        factors_DT = self.correction.factors(logprobs_DT, sampling_DT, advantages_DT, offsets_D, snapshot_DT)
        if self.correction.ratio != "loss":  # these factors replace the loss's own ratios, which become 1
            sampling_DT = logprobs_DT.detach()
        return inputs | {"logprobs": sampling_DT, "advantages": factors_DT * advantages_DT}, factors_DT

    def _trained(self, outputs: Outputs, batch: Batch | OneDatum) -> dict[str, Tensor]:
        """Return the inputs of the loss at the trained tokens."""
        inputs: dict[str, Tensor] = {}
        for name in self.loss.required_inputs(self.params):
            if name in _NEEDS:
                field = f"{_NEEDS[name]}_DT"
                value_DT = getattr(outputs if hasattr(outputs, field) else batch, field)
                assert value_DT is not None, "guaranteed by needs"
            else:  # sequence_ratio_mask: include every trained token, because all of them were sampled
                value_DT = torch.ones_like(batch.weights_DT)
            inputs[name] = value_DT[batch.mask_DT]
        return inputs


def _correction_metrics(factors_DT: Tensor, batch: Batch) -> dict[str, float]:
    assert batch.advantages_DT is not None, "guaranteed by needs"
    factors_DT = factors_DT[batch.advantages_DT[batch.mask_DT] != 0]
    if not len(factors_DT):
        return {"masked": 0.0, "factor_mean": 1.0}
    return {"masked": (factors_DT == 0).float().mean().item(), "factor_mean": factors_DT.mean().item()}


def policy_loss_term(name: str, params: Mapping[str, object], correction: Correction | None = None) -> Term:
    """Wrap a policy loss in a differentiable term.

    Raises:
        ObjectiveError: the loss or a parameter is unknown, a parameter is invalid, or the loss has no correction.
    """
    loss = find_base_loss(name)
    if correction is not None:
        correction.check_loss(name)
    evaluate = PolicyLoss(loss, loss.check_params(params), correction)
    return Term(
        name,
        kind="differentiable",
        evaluate=evaluate,
        prepare=None,
        reduction="none",
        estimator=None,
        params=NoParams,
        needs=evaluate.needs,
        unit=loss.unit,
    )

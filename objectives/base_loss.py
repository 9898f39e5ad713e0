"""The policy losses of the service as base losses of an objective."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.losses import find_built_in
from objectives.reductions import sum_by_datum
from objectives.term import NoParams, Term


def policy_loss_term(name: str, params: Mapping[str, object]) -> Term:
    """A differentiable term that is one of the service's policy losses over the trained tokens, summed.

    A weight of 0 leaves a token out of everything, the sequence ratio of gspo and the penalty of dro included;
    the size of the others plays no part, as on the service.

    Metrics:
        ratio_mean, ratio_max, kl_k1: see `objectives.losses.RatioMetrics`; means over datums.
        clip_fraction: the same, of a loss that clips.

    Raises:
        ObjectiveError: an unknown or a wrong parameter.
    """
    loss = find_built_in(name)
    checked = loss.check_params(params)

    def evaluate(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        sampling_DT, advantages_DT = outputs.sampling_logprobs_DT, batch.advantages_DT
        if sampling_DT is None or advantages_DT is None:
            raise ObjectiveError("it needs sampling_logprobs_DT of the outputs and advantages_DT of the batch")
        if outputs.logprobs_DT.ndim != 1:
            raise ObjectiveError("it takes one target at each position: only cross_entropy and callables take several")
        trained_DT = batch.mask_DT
        inputs = {
            "logprobs": sampling_DT[trained_DT],
            "advantages": advantages_DT[trained_DT],
            "sequence_ratio_mask": torch.ones_like(advantages_DT[trained_DT]),
        }
        lengths_D = sum_by_datum(torch.ones(batch.num_tokens), batch).long()
        offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)])
        logprobs_DT = outputs.logprobs_DT[trained_DT]
        watched = loss.compute_metrics(logprobs_DT, inputs, offsets_D, checked)
        metrics = {
            "ratio_mean": watched.mean_D.mean().item(),
            "ratio_max": watched.max_D.max().item(),
            "kl_k1": watched.kl_k1_D.mean().item(),
        }
        if loss.clips:
            metrics["clip_fraction"] = watched.clip_fraction_D.mean().item()
        return loss.compute(logprobs_DT, inputs, offsets_D, checked), metrics

    return Term(name, "differentiable", evaluate, None, "none", None, NoParams, ("sampling_logprobs", "advantages"))

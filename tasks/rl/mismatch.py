"""Distance between the policy in training and the policy that sampled, by position and by age of the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from objectives.losses.policy.correction import Correction
from objectives.losses.policy.ratios import summed_log_ratios
from tasks.training.batch_source import TrainedBatch

# Label of a datum: age of the weights that sampled it, in steps.
STALENESS = "staleness"

_NUM_BINS = 4


def compute_mismatch_metrics(trained: Sequence[TrainedBatch], correction: Correction | None) -> dict[str, float]:
    """Compute the distance of the trained policy p from the sampler over the sampled tokens.

    With a temperature, top-k or top-p, the distribution q of the samples is not the distribution s of the sampler's
    weights. KL compares p with s, so that it is 0 for unchanged weights; the others describe the importance ratios
    ``p / q``, whose spread a temperature increases.

    - ``mismatch/kl_v1``, ``kl_v2``, ``kl_k3``: the estimates k1, k2 (under tinker-cookbook's names) and k3 of
      KL(s || p), nats: means of ``-log r``, ``(log r)^2 / 2`` and ``r - 1 - log r`` with ``r = p / s``.
    - ``mismatch/chi_square``: the mean of ``(p / q)^2`` minus 1, an estimate of the chi-square divergence.
    - ``mismatch/ess``, ``mismatch/ess_sequence``: effective sample size, ``(sum w)^2 / sum w^2`` with ``w = p / q``,
      as a share of the tokens for token ratios, and as a share of the sequences for ratios of whole sequences.
    - ``mismatch/masked``: with a correction, the share of tokens of non-zero advantage that it drops.

    ``mismatch/position_1/...`` to ``position_4/...`` have these metrics, except `ess_sequence`, for one quarter of each
    completion, and ``mismatch/staleness_N/...`` for the samples of weights that are N steps old.
    """
    parts = [_tokens_of(minibatch, correction) for minibatch in trained]
    tokens = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sequences = torch.cat([_sequence_log_ratios(minibatch) for minibatch in trained])
    metrics = {f"mismatch/{name}": value for name, value in _summarize(tokens).items()}
    metrics["mismatch/ess_sequence"] = _effective_share(sequences)
    for number in range(_NUM_BINS):
        metrics |= _summarize_bin(f"position_{number + 1}", tokens, tokens["position"] == number)
    ages = tokens.get(STALENESS)
    for age in [] if ages is None else ages.unique().tolist():
        metrics |= _summarize_bin(f"staleness_{age}", tokens, ages == age)
    return metrics


def _tokens_of(minibatch: TrainedBatch, correction: Correction | None) -> dict[str, Tensor]:
    """Log-ratios, quarter of the completion and other values of each sampled token."""
    batch = minibatch.batch
    assert batch.sampling_logprobs_DT is not None
    assert batch.snapshot_logprobs_DT is not None
    assert batch.advantages_DT is not None
    mask_DT = batch.mask_DT
    lengths_D = torch.segment_reduce(mask_DT.float(), "sum", offsets=batch.offsets_D, axis=0).long()
    starts_D = lengths_D.cumsum(0) - lengths_D
    index_T = torch.arange(int(lengths_D.sum())) - starts_D.repeat_interleave(lengths_D)
    logprobs_T, sampling_T = minibatch.logprobs_DT[mask_DT], batch.sampling_logprobs_DT[mask_DT]
    snapshot_T, advantages_T = batch.snapshot_logprobs_DT[mask_DT], batch.advantages_DT[mask_DT]
    tokens = {
        "log_p_over_q": logprobs_T - sampling_T,
        "log_p_over_s": logprobs_T - snapshot_T,
        "position": index_T * _NUM_BINS // lengths_D.repeat_interleave(lengths_D),
    }
    if STALENESS in batch.labels_D:
        tokens[STALENESS] = batch.labels_D[STALENESS].repeat_interleave(lengths_D)
    if correction is not None:
        offsets_D = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)])
        factors_T = correction.factors(logprobs_T, sampling_T, advantages_T, offsets_D, snapshot_T)
        # NaN for tokens that train nothing anyway; they are left out of the share.
        tokens["masked"] = torch.where(advantages_T == 0, torch.nan, (factors_T == 0).float())
    return tokens


def _sequence_log_ratios(minibatch: TrainedBatch) -> Tensor:
    batch = minibatch.batch
    assert batch.sampling_logprobs_DT is not None
    return summed_log_ratios(minibatch.logprobs_DT, batch.sampling_logprobs_DT, batch.mask_DT, batch.offsets_D)


def _summarize_bin(name: str, tokens: Mapping[str, Tensor], is_inside_T: Tensor) -> dict[str, float]:
    if not bool(is_inside_T.any()):
        return {}
    inside = {key: values_T[is_inside_T] for key, values_T in tokens.items()}
    return {f"mismatch/{name}/{key}": value for key, value in _summarize(inside).items()}


def _summarize(tokens: Mapping[str, Tensor]) -> dict[str, float]:
    log_ratio_T, log_weight_T = tokens["log_p_over_s"].double(), tokens["log_p_over_q"].double()
    summary = {
        "kl_v1": -log_ratio_T.mean().item(),
        "kl_v2": log_ratio_T.square().mean().item() / 2,
        "kl_k3": (log_ratio_T.expm1() - log_ratio_T).mean().item(),
        "chi_square": (log_weight_T.exp().square().mean() - 1).item(),
        "ess": _effective_share(log_weight_T),
    }
    masked_T = tokens.get("masked")
    if masked_T is not None and not bool(masked_T.isnan().all()):
        summary["masked"] = masked_T.nanmean().item()
    return summary


def _effective_share(log_weights: Tensor) -> float:
    """Effective sample size of importance weights as a share of the samples.

    >>> round(_effective_share(torch.tensor([1.0, 1.0, 2.0]).log()), 4)
    0.8889
    """
    weights = (log_weights.double() - log_weights.max()).exp()
    return (weights.sum().square() / weights.square().sum() / len(weights)).item()

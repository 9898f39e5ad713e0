"""REINFORCE that stays put on data of another policy: a truncated weight and a pull back to the sampler."""

from __future__ import annotations

from torch import Tensor

from objectives.losses.ratios import token_log_ratios


def stable_reinforce(
    logprobs_DT: Tensor, sampling_logprobs_DT: Tensor, advantages_DT: Tensor, *, kl_coeff: float = 0.01
) -> Tensor:
    """``sum(-sg[min(r, 1)] A log p + kl_coeff (r - 1 - log r))`` over the tokens of non-zero advantage; 0-d.

    The weight is truncated at 1, so no token counts more than on-policy, and the second summand, the k3 estimate of
    the sampling policy's KL divergence from this one, pulls the policy back: its gradient, ``r - 1`` per token, is 0
    where the two agree.

    The hosted service has a loss of this name, and of this parameter, whose formula is not published: this one has
    the same purpose, and its figures differ.

    Sources: Espeholt et al. 2018, "IMPALA" (arXiv:1802.01561), for the truncated weight; Schulman 2020,
    "Approximating KL Divergence", for k3.

    Args:
        logprobs_DT: nats, ``(N,)``, of the policy in training, p.
        sampling_logprobs_DT: the same tokens under the policy that sampled them, q.
        advantages_DT: ``(N,)``; 0 leaves a token out.
        kl_coeff: weight of the divergence, at least 0.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0])
    >>> stable_reinforce(lp, lp, torch.tensor([0.5, 1.0]))
    tensor(2.5000)
    """
    log_ratio_DT = token_log_ratios(logprobs_DT, sampling_logprobs_DT, advantages_DT)
    weight_DT = log_ratio_DT.detach().clamp(max=0).exp()
    divergence_DT = log_ratio_DT.exp() - 1 - log_ratio_DT
    return (kl_coeff * divergence_DT - weight_DT * advantages_DT * logprobs_DT).sum()

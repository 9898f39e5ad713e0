"""Choosing the next token of many rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """How each of ``R`` rows chooses; `temperature_R` 0 is greedy, `top_k_R` is at least 1."""

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor

    def select(self, rows: Tensor) -> Choice:
        return Choice(self.temperature_R[rows], self.top_k_R[rows], self.top_p_R[rows])


def choose_tokens(logits_RV: Tensor, choice: Choice, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting its cumulative distribution at ``uniform_R``.

    Args:
        logits_RV: float32.
        uniform_R: float64 in [0, 1): the only randomness, so a row's draw does not depend on the others.

    Returns:
        The tokens, int64 ``(R,)``, and their logprobs under the model itself: before temperature and limits.
    """
    vocab_size = logits_RV.shape[1]
    greedy_R = choice.temperature_R == 0
    scaled_RV = logits_RV / torch.where(greedy_R, 1.0, choice.temperature_R)[:, None]
    probs_RV = scaled_RV.softmax(dim=1)
    order_RV = None
    if bool(((choice.top_k_R < vocab_size) | (choice.top_p_R < 1)).any()):
        probs_RV, order_RV = probs_RV.sort(dim=1, descending=True, stable=True)
        mass_before_RV = probs_RV.cumsum(dim=1) - probs_RV
        rank_V = torch.arange(vocab_size, device=logits_RV.device)
        outside_RV = (mass_before_RV >= choice.top_p_R[:, None]) | (rank_V >= choice.top_k_R[:, None])
        outside_RV[:, 0] = False
        probs_RV = probs_RV.masked_fill(outside_RV, 0.0)
    cumulative_RV = probs_RV.double().cumsum(dim=1)
    point_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    index_R = torch.searchsorted(cumulative_RV, point_R1, right=True)[:, 0].clamp(max=vocab_size - 1)
    if order_RV is not None:
        index_R = order_RV.gather(1, index_R[:, None])[:, 0]
    tokens_R = torch.where(greedy_R, logits_RV.argmax(dim=1), index_R)
    logprobs_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - logits_RV.logsumexp(dim=1)
    return tokens_R, logprobs_R

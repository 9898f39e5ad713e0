"""Choose the next token of many rows at once.

A row's token depends only on its own logits, parameters and random number, so that batching never changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Number of likeliest tokens to sort. The whole vocabulary is sorted only for the few rows whose limits reach further.
NUM_CANDIDATES = 1024
# Below it, the likeliest token has all of the probability, and logits divided by the temperature may overflow.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class RowSamplingParams:
    """Sampling parameters of ``R`` rows; `temperature_R` below `MIN_TEMPERATURE` is greedy, `top_k_R` is at least 1."""

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor

    def select(self, rows: Tensor) -> RowSamplingParams:
        return RowSamplingParams(self.temperature_R[rows], self.top_k_R[rows], self.top_p_R[rows])


def choose_tokens(logits_RV: Tensor, params: RowSamplingParams, uniform_R: Tensor) -> Tensor:
    """Draw one token per row by inverting its cumulative distribution at ``uniform_R``.

    Args:
        logits_RV: float32.
        uniform_R: float64 in [0, 1): the only source of randomness.

    Returns:
        int64 ``(R,)``.
    """
    vocab_size = logits_RV.shape[1]
    greedy_R = params.temperature_R < MIN_TEMPERATURE
    limited_R = ((params.top_k_R < vocab_size) | (params.top_p_R < 1)) & ~greedy_R
    tokens_R = logits_RV.argmax(dim=1)
    for draw, selected_R in ((_draw, ~limited_R & ~greedy_R), (_draw_limited, limited_R)):
        if bool(selected_R.any()):
            scaled = logits_RV[selected_R] / params.temperature_R[selected_R, None]
            tokens_R[selected_R] = draw(scaled.softmax(dim=1), params.select(selected_R), uniform_R[selected_R])
    return tokens_R


def _draw(probs_RV: Tensor, _params: RowSamplingParams, uniform_R: Tensor) -> Tensor:
    cumulative_RV = probs_RV.cumsum(dim=1, dtype=torch.float64)
    point_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    index_R = torch.searchsorted(cumulative_RV, point_R1, right=True)[:, 0]
    return index_R.clamp(max=probs_RV.shape[1] - 1)


def _draw_limited(probs_RV: Tensor, params: RowSamplingParams, uniform_R: Tensor) -> Tensor:
    """Draw from the likeliest tokens: the fewest whose mass reaches `top_p`, and at most `top_k`."""
    num_candidates = min(NUM_CANDIDATES, probs_RV.shape[1])
    top_RC, order_RC = probs_RV.topk(num_candidates, dim=1)
    tokens_R = _draw_sorted(top_RC, order_RC, params, uniform_R)
    needs_more_R = (params.top_k_R > num_candidates) & (top_RC.sum(dim=1, dtype=torch.float64) < params.top_p_R)
    if num_candidates < probs_RV.shape[1] and bool(needs_more_R.any()):
        sorted_RV, order_RV = probs_RV[needs_more_R].sort(dim=1, descending=True, stable=True)
        tokens_R[needs_more_R] = _draw_sorted(sorted_RV, order_RV, params.select(needs_more_R), uniform_R[needs_more_R])
    return tokens_R


def _draw_sorted(sorted_RC: Tensor, order_RC: Tensor, params: RowSamplingParams, uniform_R: Tensor) -> Tensor:
    mass_before_RC = sorted_RC.cumsum(dim=1, dtype=torch.float64) - sorted_RC
    rank_C = torch.arange(sorted_RC.shape[1], device=sorted_RC.device)
    outside_RC = (mass_before_RC >= params.top_p_R[:, None]) | (rank_C >= params.top_k_R[:, None])
    outside_RC[:, 0] = False
    index_R = _draw(sorted_RC.masked_fill(outside_RC, 0.0), params, uniform_R)
    return order_RC.gather(1, index_R[:, None])[:, 0]

"""Ragged batches as packed tensors: one flat tensor per field plus offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from objectives.errors import ObjectiveError

# What a term needs that reads K targets at each position. Not a field: the logprobs are (N, K) where the targets are.
TOPK = "topk_logprobs"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of datums, packed along the joined datum and token axis ``_DT``.

    Attributes:
        target_tokens_DT: int64 ``(N,)``: the token each position predicts, all datums end to end; ``(N, K)`` where
            each position has K targets, as in distillation from a teacher's likeliest tokens.
        weights_DT: float32, of the same shape: the base loss's weight of each target token; 0 is prompt or padding.
        offsets_D: int64 ``(D + 1,)``: datum ``d`` is ``[offsets_D[d], offsets_D[d + 1])``.
        texts_D: what each datum trains on (its tokens of non-zero weight), decoded; ``D`` strings.
        features: what the term's ``prepare`` made of this batch; ``None`` for a term without one.
        datums: the service's own datums, opaque here; only callables of the SDK's shape read them.
        advantages_DT: float32 ``(N,)``: how much better than expected each sampled token did; 0 outside the
            sampled ones. ``None`` for fixed data.
        sampling_logprobs_DT: float32 ``(N,)``, nats: of each sampled token under the policy that sampled it; 0 outside
            the sampled ones. ``None`` for fixed data.
        labels_D: what the data says of each datum beside its tokens, int64 ``(D,)`` by name, such as the pair or the
            group that it belongs to; see `objectives.labels`.
        values_DT: float32 ``(N,)``: what a critic expected to be earned from each sampled token on, in units of reward;
            ``None`` without one.
        returns_DT: float32 ``(N,)``: what it should have expected; ``None`` without a critic.
    """

    target_tokens_DT: Tensor
    weights_DT: Tensor
    offsets_D: Tensor
    texts_D: tuple[str, ...] = ()
    features: Any = None
    datums: Any = None
    advantages_DT: Tensor | None = None
    sampling_logprobs_DT: Tensor | None = None
    labels_D: Mapping[str, Tensor] = field(default_factory=dict)
    values_DT: Tensor | None = None
    returns_DT: Tensor | None = None

    def __post_init__(self) -> None:
        if self.num_datums == 0 or self.num_tokens == 0:
            raise ObjectiveError(
                f"A batch has {self.num_datums} datums and {self.num_tokens} tokens where at least one of "
                "each is needed: check the data file and the filters of its builder."
            )
        if not bool(self.mask_DT.any()):
            raise ObjectiveError(
                "No token of a batch has a non-zero weight, so nothing would be trained: "
                "check `train_on_what` and `max_length` of the data."
            )
        for name in ("advantages", "sampling_logprobs", "values", "returns"):
            given_DT = getattr(self, f"{name}_DT")
            if given_DT is not None and len(given_DT) != self.num_tokens:
                raise ObjectiveError(
                    f"A batch of {self.num_tokens} tokens has {len(given_DT)} {name}: give one per token, 0 "
                    "outside the sampled ones."
                )

    @property
    def num_datums(self) -> int:
        return len(self.offsets_D) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_D[-1])

    @property
    def mask_DT(self) -> Tensor:
        """bool ``(N,)``: the tokens that are trained on; of K targets, the positions where one of them is."""
        trained_DT = self.weights_DT != 0
        return trained_DT if trained_DT.ndim == 1 else trained_DT.any(-1)

    @property
    def datum_of_DT(self) -> Tensor:
        """int64 ``(N,)``: the datum each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_datums), self.offsets_D.diff())


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the service returned for a batch, packed as the batch is.

    Attributes:
        logprobs_DT: float32, nats: log-probability of each target token under the current policy, ``(N,)``, or
            ``(N, K)`` as the batch's targets are.
        ref_logprobs_DT: the same under the frozen reference, where a term needs it.
        sampling_logprobs_DT: the same under the policy that sampled the data, where a term needs it.
    """

    logprobs_DT: Tensor
    ref_logprobs_DT: Tensor | None = None
    sampling_logprobs_DT: Tensor | None = None


def pack(fields_D: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join ``D`` ragged tensors end to end: the flat tensor and its ``(D + 1,)`` offsets.

    >>> pack([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    (tensor([1., 2., 3.]), tensor([0, 2, 3]))
    """
    lengths = torch.tensor([0, *(len(field) for field in fields_D)])
    return (torch.cat(fields_D) if fields_D else torch.empty(0)), lengths.cumsum(0)


def unpack(flat_DT: Tensor, offsets_D: Tensor) -> list[Tensor]:
    """Cut a flat tensor back into its datums: the inverse of `pack`."""
    return list(flat_DT.split(offsets_D.diff().tolist()))

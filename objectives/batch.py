"""Ragged batches as packed tensors: one flat tensor per field plus offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from objectives.errors import ObjectiveError

# Need of a term that reads K targets per position. It has no field: the logprobs have the shape (N, K) of the targets.
TOPK = "topk_logprobs"


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of datums, packed along the joint datum and token axis ``_DT``.

    Attributes:
        target_tokens_DT: int64 ``(N,)``: target token of each position, datums concatenated; ``(N, K)`` with K targets
            per position, as in distillation from a teacher's top-K tokens.
        weights_DT: float32, same shape: weight of each target token in the base loss; 0 for prompt and padding.
        offsets_D: int64 ``(D + 1,)``: datum ``d`` is ``[offsets_D[d], offsets_D[d + 1])``.
        texts_D: decoded trained tokens of each datum (non-zero weight); ``D`` strings, or empty with K targets per
            position.
        features: result of the term's ``prepare`` for this batch; ``None`` for a term without ``prepare``.
        datums: the service's datums, read only by loss functions of the SDK.
        advantages_DT: float32 ``(N,)``: advantage of each sampled token, 0 for other tokens; ``None`` for fixed data.
        sampling_logprobs_DT: float32 ``(N,)``, nats: logprob of each sampled token under the policy that sampled it, 0
            for other tokens; ``None`` for fixed data.
        untempered_logprobs_DT: float32 ``(N,)``, nats: logprob of each sampled token under the sampler's weights,
            without temperature, top-k and top-p; ``None`` if sampling used none of them.
        labels_D: labels of each datum, int64 ``(D,)`` by name, such as its pair or group; see `objectives.labels`.
        text_labels_D: text labels of each datum, ``D`` strings by name, such as the constraints of its answer.
        values_DT: float32 ``(N,)``: a critic's estimate of the return from each sampled token on, in units of reward;
            ``None`` without a critic.
        returns_DT: float32 ``(N,)``: training targets of the critic; ``None`` without a critic.
        trains_base: ``False`` if only the terms train on the batch, and not the base loss.

    Raises:
        ObjectiveError: the batch has no datum, no token or no trained token, or a field with one value per token has
            another length.
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
    text_labels_D: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    untempered_logprobs_DT: Tensor | None = None
    trains_base: bool = True

    def __post_init__(self) -> None:
        if self.num_datums == 0 or self.num_tokens == 0:
            raise ObjectiveError(
                f"A batch has {self.num_datums} datums and {self.num_tokens} tokens but needs at least one of each; "
                "check the data file and the filters of its builder."
            )
        if not bool(self.mask_DT.any()):
            raise ObjectiveError(
                "No token of a batch has a non-zero weight, so there is nothing to train; check `train_on_what` and "
                "`max_length` of the data."
            )
        for name in ("advantages", "sampling_logprobs", "untempered_logprobs", "values", "returns"):
            values_DT = getattr(self, f"{name}_DT")
            if values_DT is not None and len(values_DT) != self.num_tokens:
                raise ObjectiveError(
                    f"A batch of {self.num_tokens} tokens has {len(values_DT)} {name}; pass one per token, 0 for "
                    "tokens that were not sampled."
                )

    @property
    def num_datums(self) -> int:
        return len(self.offsets_D) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_D[-1])

    @property
    def snapshot_logprobs_DT(self) -> Tensor | None:
        """Logprobs of the sampled tokens under the sampler's weights, without temperature, top-k and top-p.

        They measure how far the weights have moved since sampling. Importance ratios use `sampling_logprobs_DT`
        instead. ``None`` for fixed data.
        """
        return self.sampling_logprobs_DT if self.untempered_logprobs_DT is None else self.untempered_logprobs_DT

    @property
    def mask_DT(self) -> Tensor:
        """Mask of the trained tokens, bool ``(N,)``; with K targets, of positions with any trained target."""
        trained_DT = self.weights_DT != 0
        return trained_DT if trained_DT.ndim == 1 else trained_DT.any(-1)

    @property
    def datum_of_DT(self) -> Tensor:
        """Index of each token's datum, int64 ``(N,)``."""
        return torch.repeat_interleave(torch.arange(self.num_datums), self.offsets_D.diff())


@dataclass(frozen=True, slots=True)
class Outputs:
    """Logprobs of a batch's targets, packed like the batch.

    Attributes:
        logprobs_DT: float32, nats, shape of the targets: logprobs under the current policy.
        ref_logprobs_DT: logprobs under the frozen reference; ``None`` unless a term needs them. 0 at targets before
            the first trained one of a datum, unless the run scores whole sequences.
        sampling_logprobs_DT: logprobs under the policy that sampled the data; ``None`` unless a term needs them.
    """

    logprobs_DT: Tensor
    ref_logprobs_DT: Tensor | None = None
    sampling_logprobs_DT: Tensor | None = None


def pack(fields_D: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate ``D`` ragged tensors; return the flat tensor and its ``(D + 1,)`` offsets.

    >>> pack([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    (tensor([1., 2., 3.]), tensor([0, 2, 3]))
    """
    lengths = torch.tensor([0, *(len(field) for field in fields_D)])
    return (torch.cat(fields_D) if fields_D else torch.empty(0)), lengths.cumsum(0)


def pack_targets(
    targets_D: list[Tensor], weights_D: list[Tensor], decode: Callable[[list[int]], object], **fields: Any
) -> Batch:
    """Pack the targets and weights of datums into a batch.

    Args:
        targets_D: target tokens of each datum, int64, ``(T,)`` or ``(T, K)``.
        weights_D: weights of the targets, in the same shapes.
        decode: tokenizer's `decode`. The text of a datum is decoded from its trained targets; a batch with several
            targets per position has no texts.
        fields: other fields of `Batch`.
    """
    target_tokens_DT, offsets_D = pack(targets_D)
    texts_D: tuple[str, ...] = ()
    if target_tokens_DT.ndim == 1:
        trained_D = (targets[weights != 0] for targets, weights in zip(targets_D, weights_D, strict=True))
        texts_D = tuple(str(decode(targets.tolist())) for targets in trained_D)
    return Batch(target_tokens_DT, pack(weights_D)[0], offsets_D, texts_D, **fields)


def unpack(flat_DT: Tensor, offsets_D: Tensor) -> list[Tensor]:
    """Split a flat tensor into its datums, the inverse of `pack`."""
    return list(flat_DT.split(offsets_D.diff().tolist()))

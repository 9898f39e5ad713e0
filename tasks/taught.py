"""What a teacher made of one sequence, to be learned from: kept with the run, packed into batches."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from objectives.batch import Batch, pack
from tasks.data import Datums
from tasks.teacher import TopK, trained_of


@dataclass(frozen=True, slots=True)
class Taught:
    """A sequence with what is to be learned of it.

    Attributes:
        datum: one target per position; a weight of 0 is not trained.
        top: the teacher's likeliest tokens where it is trained; None where the targets themselves are learned.
    """

    datum: tinker.Datum
    top: TopK | None = None

    def state(self) -> dict[str, Any]:
        """As JSON can hold it."""
        inputs = self.datum.loss_fn_inputs
        kept = {
            "input": _write(np.array(self.datum.model_input.to_ints(), "<i4")),
            "targets": _write(inputs["target_tokens"].to_numpy().astype("<i4")),
            "weights": _write(inputs["weights"].to_numpy().astype("<f4")),
        }
        if self.top:
            kept["top"] = _write(self.top.tokens_MK.numpy().astype("<i4"))
            kept["probs"] = _write(self.top.probs_MK.numpy().astype("<f4"))
        return kept

    @classmethod
    def of_state(cls, kept: Mapping[str, str]) -> Taught:
        """What `state` said."""
        datum = tinker.Datum(
            model_input=types.ModelInput.from_ints(_read(kept["input"], "<i4").tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch(_read(kept["targets"], "<i4").long()),
                "weights": types.TensorData.from_torch(_read(kept["weights"], "<f4")),
            },
        )
        if "top" not in kept:
            return cls(datum)
        shape = (len(trained_of(datum)), -1)
        return cls(
            datum, TopK(_read(kept["top"], "<i4").long().reshape(shape), _read(kept["probs"], "<f4").reshape(shape))
        )

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Targets and weights ``(T,)``, or ``(T, K)`` of soft ones; the weights of a sequence add up to 1."""
        targets_T = self.datum.loss_fn_inputs["target_tokens"].to_torch().long()
        weights_T = self.datum.loss_fn_inputs["weights"].to_torch().float()
        weights_T = weights_T / weights_T.sum()
        if self.top is None:
            return targets_T, weights_T
        trained, num_tokens = trained_of(self.datum), self.top.tokens_MK.shape[1]
        targets_TK = targets_T[:, None].repeat(1, num_tokens)
        targets_TK[trained] = self.top.tokens_MK
        weights_TK = torch.zeros(targets_TK.shape)
        weights_TK[trained] = weights_T[trained, None] * self.top.probs_MK
        return targets_TK, weights_TK


def pack_taught(taught_D: Sequence[Taught], tokenizer: Tokenizer) -> Batch:
    """The batch of some sequences; the text of each is what it was sampled or given as."""
    arrays_D = [each.arrays() for each in taught_D]
    target_tokens_DT, offsets_D = pack([targets for targets, _ in arrays_D])
    return Batch(
        target_tokens_DT,
        pack([weights for _, weights in arrays_D])[0],
        offsets_D,
        tuple(str(tokenizer.decode(_trained_targets(each.datum))) for each in taught_D),
        datums=Datums(
            [_datum(each, targets, weights) for each, (targets, weights) in zip(taught_D, arrays_D, strict=True)]
        ),
    )


def compute_forward_kl(batch: Batch, logprobs_DT: Tensor) -> float:
    """``sum p log(p / q)`` over the teacher's K likeliest tokens, mean over the trained positions, nats.

    Args:
        batch: of K targets, whose weights are ``p`` times that of the position.
        logprobs_DT: ``log q``, ``(N, K)``, of the student.
    """
    trained = batch.mask_DT
    weights_MK, logprobs_MK = batch.weights_DT[trained], logprobs_DT[trained]
    weights_M = weights_MK.sum(-1)
    probs_MK = weights_MK / weights_M[:, None]
    distance_M = (torch.special.xlogy(probs_MK, probs_MK) - probs_MK * logprobs_MK).sum(-1)
    return float((distance_M * weights_M).sum() / weights_M.sum())


def _datum(taught: Taught, targets: Tensor, weights: Tensor) -> tinker.Datum:
    inputs = {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}
    return tinker.Datum(model_input=taught.datum.model_input, loss_fn_inputs=inputs)


def _trained_targets(datum: tinker.Datum) -> list[int]:
    return datum.loss_fn_inputs["target_tokens"].to_torch()[trained_of(datum)].tolist()


def _write(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _read(text: str, dtype: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).copy())

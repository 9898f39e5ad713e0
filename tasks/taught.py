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
        drawn: whether its teacher drew the targets, as likely as `top` says.
    """

    datum: tinker.Datum
    top: TopK | None = None
    drawn: bool = False

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
        return kept | {"drawn": self.drawn}

    @classmethod
    def of_state(cls, kept: Mapping[str, Any]) -> Taught:
        """What `state` said."""
        datum = tinker.Datum(
            model_input=types.ModelInput.from_ints(_read(kept["input"], "<i4").tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch(_read(kept["targets"], "<i4").long()),
                "weights": types.TensorData.from_torch(_read(kept["weights"], "<f4")),
            },
        )
        # A run of an earlier release kept no `drawn`, and probabilities of the K alone.
        drawn = kept.get("drawn", False)
        if "top" not in kept:
            return cls(datum, drawn=drawn)
        shape = (len(trained_of(datum)), -1)
        top = TopK(_read(kept["top"], "<i4").long().reshape(shape), _read(kept["probs"], "<f4").reshape(shape))
        return cls(datum, top, drawn)

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Targets and weights ``(T,)``, or ``(T, K)`` of soft ones; the weights of a sequence add up to 1.

        Those of a drawn one with soft targets do so on the mean over what its teacher may draw.
        """
        targets_T = self.datum.loss_fn_inputs["target_tokens"].to_torch().long()
        weights_T = self.datum.loss_fn_inputs["weights"].to_torch().float()
        weights_T = weights_T / weights_T.sum()
        if self.top is None:
            return targets_T, weights_T
        trained, (tokens_MK, probs_MK) = trained_of(self.datum), self.top
        if self.drawn:
            soft_MK = _whole_vocabulary(self.top, targets_T[trained])
        else:
            soft_MK = TopK(tokens_MK, probs_MK / probs_MK.sum(-1, keepdim=True))
        targets_TK = targets_T[:, None].repeat(1, tokens_MK.shape[1])
        targets_TK[trained] = soft_MK.tokens_MK
        weights_TK = torch.zeros(targets_TK.shape)
        weights_TK[trained] = weights_T[trained, None] * soft_MK.probs_MK
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


def compute_forward_kl(taught_D: Sequence[Taught], logprobs_DT: Tensor) -> float:
    """``sum p log(p / q)`` over the teacher's K - 1 likeliest tokens and all others as one, nats per trained token.

    Args:
        taught_D: with soft targets.
        logprobs_DT: ``log q``, ``(N, K)``, of the student.
    """
    distances, weights, start = [], [], 0
    for each in taught_D:
        assert each.top is not None, "soft"
        weights_T = each.datum.loss_fn_inputs["weights"].to_torch().float()
        trained = trained_of(each.datum)
        p_MK = _with_rest(each.top.probs_MK[:, :-1])
        q_MK = _with_rest(logprobs_DT[start + trained, :-1].exp())
        distances.append((torch.special.xlogy(p_MK, p_MK) - torch.special.xlogy(p_MK, q_MK)).sum(-1))
        weights.append(weights_T[trained] / weights_T.sum())
        start += len(weights_T)
    weights_M = torch.cat(weights)
    return float((torch.cat(distances) * weights_M).sum() / weights_M.sum())


def _whole_vocabulary(top: TopK, drawn_M: Tensor) -> TopK:
    """Targets whose weighted cross entropy is, on the mean over draws, that over all that the teacher may say.

    The K - 1 likeliest tokens stand for themselves, and a drawn token that is none of them for all others; by the K
    alone the student would learn that there are no others. Source: Anshumann et al. 2025 (arXiv:2503.16870).
    """
    tokens_MK, probs_MK = top
    beyond_M = (tokens_MK[:, :-1] != drawn_M[:, None]).all(-1)
    last_M = torch.where(beyond_M, drawn_M, tokens_MK[:, -1])
    return TopK(
        torch.cat([tokens_MK[:, :-1], last_M[:, None]], -1), torch.cat([probs_MK[:, :-1], beyond_M[:, None]], -1)
    )


def _with_rest(probs_MK: Tensor) -> Tensor:
    """Beside them what is left of 1; never 0, which no student says of anything."""
    rest_M = (1 - probs_MK.sum(-1)).clamp(min=torch.finfo(torch.float32).eps)
    return torch.cat([probs_MK, rest_M[:, None]], -1)


def _datum(taught: Taught, targets: Tensor, weights: Tensor) -> tinker.Datum:
    inputs = {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}
    return tinker.Datum(model_input=taught.datum.model_input, loss_fn_inputs=inputs)


def _trained_targets(datum: tinker.Datum) -> list[int]:
    return datum.loss_fn_inputs["target_tokens"].to_torch()[trained_of(datum)].tolist()


def _write(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _read(text: str, dtype: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).copy())

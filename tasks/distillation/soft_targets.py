"""Sequences with hard or soft targets from a teacher: cached with the run and packed into batches."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import tinker
import torch
from tinker import types
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from objectives.batch import Batch, pack, unpack
from objectives.labels import PROMPT, find_prompts
from tasks.training.datums import Datums
from tasks.training.teacher import TopK, trained_positions


@dataclass(frozen=True, slots=True)
class TeacherSequence:
    """Sequence with a teacher's targets.

    Attributes:
        datum: one target per position; positions with weight 0 are not trained.
        top: teacher's most likely tokens at the trained positions; None to train on the targets of `datum`.
        drawn: True if the teacher sampled the targets from the distribution of `top`.
        text_labels: text labels of the environment that the teacher's completion ran in.
    """

    datum: tinker.Datum
    top: TopK | None = None
    drawn: bool = False
    text_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Return whether a target has a weight: not of a prompt longer than `max_length`, or of masked turns only."""
        return len(trained_positions(self.datum)) > 0

    def to_json(self) -> dict[str, Any]:
        """Return the sequence as JSON data."""
        inputs = self.datum.loss_fn_inputs
        data: dict[str, Any] = {
            "input": _write(np.array(self.datum.model_input.to_ints(), "<i4")),
            "targets": _write(inputs["target_tokens"].to_numpy().astype("<i4")),
            "weights": _write(inputs["weights"].to_numpy().astype("<f4")),
        }
        if self.top:
            data["top"] = _write(self.top.tokens_MK.numpy().astype("<i4"))
            data["probs"] = _write(self.top.probs_MK.numpy().astype("<f4"))
        labels = {"text_labels": dict(self.text_labels)} if self.text_labels else {}
        return data | {"drawn": self.drawn} | labels

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TeacherSequence:
        """Restore a sequence from the data of `to_json`."""
        datum = tinker.Datum(
            model_input=types.ModelInput.from_ints(_read(data["input"], "<i4").tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch(_read(data["targets"], "<i4").long()),
                "weights": types.TensorData.from_torch(_read(data["weights"], "<f4")),
            },
        )
        # Earlier releases stored no `drawn`, and probabilities renormalized over the top K.
        drawn, text_labels = data.get("drawn", False), data.get("text_labels", {})
        if "top" not in data:
            return cls(datum, drawn=drawn, text_labels=text_labels)
        shape = (len(trained_positions(datum)), -1)
        top = TopK(_read(data["top"], "<i4").long().reshape(shape), _read(data["probs"], "<f4").reshape(shape))
        return cls(datum, top, drawn, text_labels)

    def targets_and_weights(self) -> tuple[Tensor, Tensor]:
        """Targets and weights, each ``(T,)`` for hard and ``(T, K)`` for soft targets.

        The weights of a sequence sum to 1. For drawn sequences with soft targets they sum to 1 in expectation over the
        teacher's samples.
        """
        targets_T = self.datum.loss_fn_inputs["target_tokens"].to_torch().long()
        weights_T = self.datum.loss_fn_inputs["weights"].to_torch().float()
        weights_T = weights_T / weights_T.sum()
        if self.top is None:
            return targets_T, weights_T
        trained, tokens_MK, probs_MK = trained_positions(self.datum), self.top.tokens_MK, self.top.probs_MK
        if self.drawn:
            soft_MK = _unbiased_targets(self.top, targets_T[trained])
        else:
            soft_MK = TopK(tokens_MK, probs_MK / probs_MK.sum(-1, keepdim=True))
        targets_TK = targets_T[:, None].repeat(1, tokens_MK.shape[1])
        targets_TK[trained] = soft_MK.tokens_MK
        weights_TK = torch.zeros(targets_TK.shape)
        weights_TK[trained] = weights_T[trained, None] * soft_MK.probs_MK
        return targets_TK, weights_TK


def pack_sequences(sequences_D: Sequence[TeacherSequence], tokenizer: Tokenizer) -> Batch:
    """Pack sequences into a batch; the text of a sequence is the text of its hard targets."""
    arrays_D = [sequence.targets_and_weights() for sequence in sequences_D]
    target_tokens_DT, offsets_D = pack([targets for targets, _ in arrays_D])
    return Batch(
        target_tokens_DT,
        pack([weights for _, weights in arrays_D])[0],
        offsets_D,
        tuple(str(tokenizer.decode(_trained_targets(sequence.datum))) for sequence in sequences_D),
        labels_D={
            PROMPT: find_prompts(
                [sequence.datum for sequence in sequences_D],
                [sequence.datum.loss_fn_inputs["weights"].to_torch() for sequence in sequences_D],
            )
        },
        datums=Datums([_datum(sequence, *arrays) for sequence, arrays in zip(sequences_D, arrays_D, strict=True)]),
    )


def compute_forward_kl(sequences_D: Sequence[TeacherSequence], logprobs_DTK: Tensor) -> float:
    """Forward KL ``sum p log(p / q)`` of the student's q to the teacher's p, nats: mean over sequences of token means.

    The sum is over the teacher's K - 1 most likely tokens and the remaining probability mass as one token.

    Args:
        sequences_D: sequences with soft targets.
        logprobs_DTK: student's ``log q``, ``(N, K)``.
    """
    distances, weights, start = [], [], 0
    for sequence in sequences_D:
        assert sequence.top is not None, "the forward KL needs soft targets"
        weights_T = sequence.datum.loss_fn_inputs["weights"].to_torch().float()
        trained = trained_positions(sequence.datum)
        distances.append(_forward_kl(sequence.top.probs_MK[:, :-1], logprobs_DTK[start + trained, :-1]))
        weights.append(weights_T[trained] / weights_T.sum())
        start += len(weights_T)
    weights_M = torch.cat(weights)
    return float((torch.cat(distances) * weights_M).sum() / weights_M.sum())


class OnPolicyTopK(NamedTuple):
    """Batch of a student's samples with a teacher's soft targets.

    Attributes:
        batch: the batch, with K targets per position.
        probs_DTK: teacher's probabilities of the targets under its full distribution; 0 at positions without targets.
    """

    batch: Batch
    probs_DTK: Tensor

    def forward_kl(self, logprobs_DTK: Tensor) -> float:
        """Forward KL from the teacher to the student, in nats per trained token.

        The rest of the vocabulary counts as one more token.

        Args:
            logprobs_DTK: student's logprobs of the targets.
        """
        mask_DT = self.batch.mask_DT
        return _forward_kl(self.probs_DTK[mask_DT], logprobs_DTK[mask_DT]).mean().item()


def with_top_k(batch: Batch, tops_D: Sequence[TopK], skip_first_n_tokens: int) -> OnPolicyTopK:
    """Replace the sampled targets of a batch by a teacher's soft targets, as tinker-cookbook's SDFT does.

    The weights of each trained position are the teacher's probabilities of its K most likely tokens, normalized to 1.

    Args:
        batch: student's samples, one target per position.
        tops_D: teacher's most likely tokens at the sampled positions of each datum.
        skip_first_n_tokens: number of sampled tokens at the start of each datum that get no targets.

    Raises:
        ConfigError: no datum has more sampled tokens than are skipped.
    """
    targets_DTK = batch.target_tokens_DT[:, None].repeat(1, tops_D[0].tokens_MK.shape[1])
    probs_DTK = torch.zeros(targets_DTK.shape)
    for start, datum, top in zip(batch.offsets_D[:-1].tolist(), batch.datums, tops_D, strict=True):
        positions = start + trained_positions(datum)[skip_first_n_tokens:]
        targets_DTK[positions] = top.tokens_MK[skip_first_n_tokens:]
        probs_DTK[positions] = top.probs_MK[skip_first_n_tokens:]
    if not bool(probs_DTK.any()):
        raise ConfigError(
            f"No sample of a step has more than skip_first_n_tokens={skip_first_n_tokens} tokens: reduce "
            "skip_first_n_tokens."
        )
    weights_DTK = probs_DTK / probs_DTK.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    pairs_D = zip(unpack(targets_DTK, batch.offsets_D), unpack(weights_DTK, batch.offsets_D), strict=True)
    datums = [
        tinker.Datum(model_input=datum.model_input, loss_fn_inputs=_inputs(targets, weights))
        for datum, (targets, weights) in zip(batch.datums, pairs_D, strict=True)
    ]
    soft = replace(
        batch,
        target_tokens_DT=targets_DTK,
        weights_DT=weights_DTK,
        datums=Datums(datums),
        advantages_DT=None,
        sampling_logprobs_DT=None,
        values_DT=None,
        returns_DT=None,
    )
    return OnPolicyTopK(soft, probs_DTK)


def _forward_kl(probs_MK: Tensor, logprobs_MK: Tensor) -> Tensor:
    """``sum p log(p / q)`` over K tokens and the rest of the vocabulary as one more, ``(M,)``."""
    p_MK, q_MK = _with_rest(probs_MK), _with_rest(logprobs_MK.exp())
    return (torch.special.xlogy(p_MK, p_MK) - torch.special.xlogy(p_MK, q_MK)).sum(-1)


def _unbiased_targets(top: TopK, drawn_M: Tensor) -> TopK:
    """Targets whose expected weighted cross-entropy is the cross-entropy to the teacher's full distribution.

    The K - 1 most likely tokens have their own probabilities. A drawn token outside of them has weight 1 and stands for
    the rest of the vocabulary. Source: Anshumann et al. 2025 (arXiv:2503.16870).
    """
    tokens_MK, probs_MK = top.tokens_MK, top.probs_MK
    in_rest_M = (tokens_MK[:, :-1] != drawn_M[:, None]).all(-1)
    last_M = torch.where(in_rest_M, drawn_M, tokens_MK[:, -1])
    return TopK(
        torch.cat([tokens_MK[:, :-1], last_M[:, None]], -1), torch.cat([probs_MK[:, :-1], in_rest_M[:, None]], -1)
    )


def _with_rest(probs_MK: Tensor) -> Tensor:
    """Probabilities with the remaining mass as one more column, at least one float32 epsilon."""
    rest_M = (1 - probs_MK.sum(-1)).clamp(min=torch.finfo(torch.float32).eps)
    return torch.cat([probs_MK, rest_M[:, None]], -1)


def _datum(sequence: TeacherSequence, targets: Tensor, weights: Tensor) -> tinker.Datum:
    return tinker.Datum(model_input=sequence.datum.model_input, loss_fn_inputs=_inputs(targets, weights))


def _inputs(targets: Tensor, weights: Tensor) -> dict[str, types.TensorData]:
    return {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}


def _trained_targets(datum: tinker.Datum) -> list[int]:
    return datum.loss_fn_inputs["target_tokens"].to_torch()[trained_positions(datum)].tolist()


def _write(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _read(text: str, dtype: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).copy())

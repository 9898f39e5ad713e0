"""Teachers: frozen models that score a student's tokens or provide soft targets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import tinker
import torch
from tinker import types
from torch import Tensor

from blocks.errors import NotFiniteError, ServiceError
from tasks.common.event_loop import run_coroutine
from tasks.common.prompt_scores import last_n, score_last_tokens
from tasks.common.service_errors import service_errors
from tasks.common.task import retried_task


@dataclass(frozen=True, slots=True)
class Teacher:
    """Frozen model to learn from.

    Attributes:
        sampler: client of its weights.
        name: name in error messages.
        can_score_last_n: True if the service can score the end of a sequence alone (`supports_last_n`); a sequence is
            then scored from its first trained token on.
    """

    sampler: tinker.SamplingClient
    name: str
    can_score_last_n: bool = False


class TeacherRequest(NamedTuple):
    """Datum that a teacher scores; its prompt may differ from the student's."""

    teacher: Teacher
    datum: tinker.Datum


class TopK(NamedTuple):
    """Teacher's most likely tokens at the trained positions of a datum.

    Attributes:
        tokens_MK: token IDs, int64.
        probs_MK: probabilities under the teacher's full distribution, float32.
        target_logprobs_M: teacher's logprobs of the datum's own targets, float32; None if unknown.
    """

    tokens_MK: Tensor
    probs_MK: Tensor
    target_logprobs_M: Tensor | None = None


@retried_task(name="teacher")
def score(requests: Sequence[TeacherRequest]) -> list[Tensor]:
    """Return the teacher's logprobs of the trained targets of each datum, float32 ``(M,)``, in nats.

    Raises:
        ServiceError: the service failed, or a teacher's logprob is not finite.
    """
    return run_coroutine(score_all(requests))


async def score_all(requests: Sequence[TeacherRequest]) -> list[Tensor]:
    """Score on the current event loop; see `score`."""
    return list(await asyncio.gather(*(_score(request) for request in requests)))


@retried_task(name="teacher")
def compute_top_k(requests: Sequence[TeacherRequest], top_k: int) -> list[TopK]:
    """Return the teacher's most likely tokens at the trained positions of each datum.

    Raises:
        ServiceError: the service failed or does not return top-k tokens of a prompt.
    """

    async def compute_all() -> list[TopK]:
        return list(await asyncio.gather(*(_compute_top_k(request, top_k) for request in requests)))

    return run_coroutine(compute_all())


def trained_positions(datum: tinker.Datum) -> Tensor:
    """Positions of the trained targets, int64 ``(M,)``."""
    return datum.loss_fn_inputs["weights"].to_torch().nonzero()[:, 0]


def replace_prompt(prompt: tinker.ModelInput, datum: tinker.Datum) -> tinker.Datum:
    """Datum with another prompt before the trained targets, which must be one answer at the end of the datum.

    >>> from tinker import types
    >>> weights = types.TensorData(data=[0.0, 1.0, 1.0], dtype="float32", shape=[3])
    >>> targets = types.TensorData(data=[2, 7, 8], dtype="int64", shape=[3])
    >>> inputs = {"target_tokens": targets, "weights": weights}
    >>> datum = tinker.Datum(model_input=types.ModelInput.from_ints([1, 2, 7]), loss_fn_inputs=inputs)
    >>> moved = replace_prompt(types.ModelInput.from_ints([4]), datum)
    >>> moved.model_input.to_ints(), moved.loss_fn_inputs["target_tokens"].data, moved.loss_fn_inputs["weights"].data
    ([4, 7], [7, 8], [1.0, 1.0])
    """
    answer = datum.loss_fn_inputs["target_tokens"].to_torch()[trained_positions(datum)].tolist()
    return hard_datum([*prompt.to_ints(), *answer], [0.0] * prompt.length + [1.0] * len(answer))


def hard_datum(tokens: Sequence[int], weights: Sequence[float]) -> tinker.Datum:
    """Datum with one target per position.

    Args:
        tokens: prompt and answer.
        weights: weight of each token as a target.
    """
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            "weights": types.TensorData.from_torch(torch.tensor(weights[1:])),
        },
    )


async def _score(request: TeacherRequest) -> Tensor:
    teacher, positions_M = request.teacher, trained_positions(request.datum)
    tokens, first = _input_with_last_target(request.datum), int(positions_M[0]) + 1
    with service_errors(f"query the teacher {teacher.name}"):
        logprobs = await score_last_tokens(teacher.sampler, tokens, first, can_score_last_n=teacher.can_score_last_n)
    # The first token of a sequence has no logprob.
    logprobs_T = torch.tensor([torch.nan if value is None else value for value in logprobs[1:]])
    logprobs_M = logprobs_T[positions_M]
    if not bool(logprobs_M.isfinite().all()):
        raise NotFiniteError(
            f"The teacher {request.teacher.name} gives the logprob {logprobs_M.min()} to a token: check its weights."
        )
    return logprobs_M


async def _compute_top_k(request: TeacherRequest, top_k: int) -> TopK:
    teacher, tokens = request.teacher, _input_with_last_target(request.datum)
    positions = (trained_positions(request.datum) + 1).tolist()
    with service_errors(f"query the teacher {teacher.name}"):
        response = await teacher.sampler.sample(
            tokens,
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=top_k,
            prompt_logprobs_last_n=last_n(tokens, positions[0]) if teacher.can_score_last_n else None,
        )
    top_T = response.topk_prompt_logprobs
    rows = [top_T[position] or [] for position in positions] if top_T else [[]]
    if not all(rows):  # an empty row has no tokens
        raise ServiceError(
            f"The service returns no top-k tokens of a prompt for the teacher {request.teacher.name}: set top_k to 0 "
            "or use another service."
        )
    rows = [_pad(row, top_k) for row in rows]
    logprobs_MK = torch.tensor([[logprob for _, logprob in row] for row in rows])
    targets_T = response.prompt_logprobs
    targets = [targets_T[position] for position in positions] if targets_T else []
    target_logprobs_M = torch.tensor([torch.nan if value is None else value for value in targets]) if targets else None
    return TopK(torch.tensor([[token for token, _ in row] for row in rows]), logprobs_MK.exp(), target_logprobs_M)


def _pad(row: list[tuple[int, float]], top_k: int) -> list[tuple[int, float]]:
    """Cut a row to K tokens, or pad it with other tokens, of probability 0; a vocabulary has at least K tokens.

    >>> _pad([(7, -0.1), (0, -2.4)], 4)
    [(7, -0.1), (0, -2.4), (1, -inf), (2, -inf)]
    """
    tokens = {token for token, _ in row}
    others = (token for token in count() if token not in tokens)
    return row[:top_k] + [(token, -torch.inf) for token in islice(others, max(0, top_k - len(row)))]


def _input_with_last_target(datum: tinker.Datum) -> tinker.ModelInput:
    """Input of a datum followed by its last target token."""
    return datum.model_input.append_int(int(datum.loss_fn_inputs["target_tokens"].data[-1]))

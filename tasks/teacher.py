"""Teachers: models that are never trained, and what they make of the tokens that a student is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tinker
import torch
from tinker import types
from torch import Tensor

from blocks.errors import PoisonedError, ServiceError
from tasks.options import retried_task
from tasks.rollout import run_coroutine
from tasks.service_errors import service_errors


@dataclass(frozen=True, slots=True)
class Teacher:
    """Weights to learn from.

    Attributes:
        sampler: of the weights.
        name: what they are called in errors.
    """

    sampler: tinker.SamplingClient
    name: str


class Asked(NamedTuple):
    """A datum as a teacher sees it, which may be behind another prompt than the student's."""

    teacher: Teacher
    datum: tinker.Datum


class TopK(NamedTuple):
    """A teacher's likeliest tokens at the trained positions of a datum.

    Attributes:
        tokens_MK: int64.
        probs_MK: float32, of all that the teacher may say.
    """

    tokens_MK: Tensor
    probs_MK: Tensor


@retried_task(name="teacher")
def score(asked: Sequence[Asked]) -> list[Tensor]:
    """float32 ``(M,)`` nats of each datum: what its teacher makes of each of its trained targets.

    Raises:
        ServiceError: the service failed, or a teacher's logprob is not finite.
    """
    return run_coroutine(score_all(asked))


async def score_all(asked: Sequence[Asked]) -> list[Tensor]:
    """`score` where one waits for it on a loop."""
    return list(await asyncio.gather(*(_score(each) for each in asked)))


@retried_task(name="teacher")
def soften(asked: Sequence[Asked], top_k: int) -> list[TopK]:
    """The likeliest tokens of the teacher of each datum, where the datum is trained.

    Raises:
        ServiceError: the service failed, or gives no such tokens.
    """

    async def soften_all() -> list[TopK]:
        return list(await asyncio.gather(*(_soften(each, top_k) for each in asked)))

    return run_coroutine(soften_all())


def trained_of(datum: tinker.Datum) -> Tensor:
    """int64 ``(M,)``: the positions whose targets are trained."""
    return datum.loss_fn_inputs["weights"].to_torch().nonzero()[:, 0]


def behind(prompt: tinker.ModelInput, datum: tinker.Datum) -> tinker.Datum:
    """A datum whose trained targets stand behind another prompt; they are one answer, at its end.

    >>> from tinker import types
    >>> weights = types.TensorData(data=[0.0, 1.0, 1.0], dtype="float32", shape=[3])
    >>> targets = types.TensorData(data=[2, 7, 8], dtype="int64", shape=[3])
    >>> inputs = {"target_tokens": targets, "weights": weights}
    >>> datum = tinker.Datum(model_input=types.ModelInput.from_ints([1, 2, 7]), loss_fn_inputs=inputs)
    >>> moved = behind(types.ModelInput.from_ints([4]), datum)
    >>> moved.model_input.to_ints(), moved.loss_fn_inputs["target_tokens"].data, moved.loss_fn_inputs["weights"].data
    ([4, 7], [7, 8], [1.0, 1.0])
    """
    answer = datum.loss_fn_inputs["target_tokens"].to_torch()[trained_of(datum)].tolist()
    return hard_datum([*prompt.to_ints(), *answer], [0.0] * prompt.length + [1.0] * len(answer))


def hard_datum(tokens: Sequence[int], weights: Sequence[float]) -> tinker.Datum:
    """A datum of one target per position.

    Args:
        tokens: all of it.
        weights: of each token as a target.
    """
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            "weights": types.TensorData.from_torch(torch.tensor(weights[1:])),
        },
    )


async def _score(asked: Asked) -> Tensor:
    with service_errors(f"ask the teacher {asked.teacher.name}"):
        logprobs = await asked.teacher.sampler.compute_logprobs(_whole(asked.datum))
    # The first token of a sequence has none.
    found_M = torch.tensor([0.0 if value is None else value for value in logprobs[1:]])[trained_of(asked.datum)]
    if not bool(found_M.isfinite().all()):
        raise PoisonedError(
            f"The teacher {asked.teacher.name} gives the logprob {found_M.min()} to a token: look at its weights."
        )
    return found_M


async def _soften(asked: Asked, top_k: int) -> TopK:
    with service_errors(f"ask the teacher {asked.teacher.name}"):
        answer = await asked.teacher.sampler.sample(
            _whole(asked.datum),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=top_k,
        )
    found = answer.topk_prompt_logprobs
    rows = [found[position] or [] for position in (trained_of(asked.datum) + 1).tolist()] if found else [[]]
    if not all(rows):
        raise ServiceError(
            f"The teacher {asked.teacher.name} gives no top_k tokens of a prompt: set top_k to 0, or take another "
            "service."
        )
    full = [_row(row, top_k) for row in rows]
    logprobs_MK = torch.tensor([[logprob for _, logprob in row] for row in full])
    return TopK(torch.tensor([[token for token, _ in row] for row in full]), logprobs_MK.exp())


def _row(row: list[tuple[int, float]], top_k: int) -> list[tuple[int, float]]:
    """Exactly K of them: what a small vocabulary lacks is filled up with a probability of 0."""
    return row[:top_k] + [(row[0][0], -torch.inf)] * (top_k - len(row))


def _whole(datum: tinker.Datum) -> tinker.ModelInput:
    return datum.model_input.append_int(int(datum.loss_fn_inputs["target_tokens"].data[-1]))

"""Samples of a policy: answers to conversations, and the logprobs that a policy gives to answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import tinker
from tinker import types
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError, PoisonedError, reason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        num_samples: of each conversation.
        max_tokens: of an answer, which ends there where it has not ended before.
        temperature: 0 takes the likeliest token, 1 draws from the policy as it is.
        seed: of the draws; the same policy and seed give the same answers.
    """

    num_samples: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer.

    Attributes:
        prompt: tokens of the conversation before it.
        tokens: its own, with the one that ends it.
        text: what it says.
        truncated: it had no end within `max_tokens`.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    truncated: bool


def open_renderer(name: str, tokenizer: Tokenizer) -> Renderer:
    """The chat format of a model.

    Raises:
        ConfigError: there is none of that name, or it needs another tokenizer.
    """
    try:
        return get_renderer(name, tokenizer)
    except (TinkerCookbookError, ValueError, KeyError, AssertionError) as error:
        raise ConfigError(
            f"renderer_name is {name!r}, which cannot be used with the model's tokenizer ({reason(error)}): give a "
            "renderer of tinker-cookbook that suits the model, as qwen3_instruct for ChatML."
        ) from error


async def sample_answers(
    sampler: tinker.SamplingClient, renderer: Renderer, conversations: Sequence[Sequence[Message]], sampling: Sampling
) -> list[list[Answer]]:
    """`num_samples` answers to each conversation, in the order of the conversations: ``[P][G]``."""

    async def answer(index: int, messages: Sequence[Message]) -> list[Answer]:
        prompt = renderer.build_generation_prompt(list(messages))
        response = await sampler.sample(
            prompt=prompt,
            num_samples=sampling.num_samples,
            sampling_params=types.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                # That of a request's n-th sample is the request's plus n: two prompts never share draws.
                seed=sampling.seed + index * sampling.num_samples,
                stop=renderer.get_stop_sequences(),
            ),
        )
        return [_answer(renderer, prompt.to_ints(), each) for each in response.sequences]

    return list(await asyncio.gather(*(answer(index, messages) for index, messages in enumerate(conversations))))


async def score_answers(sampler: tinker.SamplingClient, answers: Sequence[Answer]) -> list[list[float]]:
    """The logprob in nats that a policy gives to each token of each answer, after its prompt.

    Raises:
        PoisonedError: one of them is not finite.
    """

    async def score(answer: Answer) -> list[float]:
        tokens = types.ModelInput.from_ints([*answer.prompt, *answer.tokens])
        logprobs = await sampler.compute_logprobs(tokens)
        found = [math.nan if value is None else value for value in logprobs[len(answer.prompt) :]]
        if not all(math.isfinite(value) for value in found):
            raise PoisonedError(
                f"The policy gives the logprob {min(found)} to a token of an answer: look at its weights."
            )
        return found

    return list(await asyncio.gather(*(score(answer) for answer in answers)))


def _answer(renderer: Renderer, prompt: list[int], sequence: types.SampledSequence) -> Answer:
    message, _ = renderer.parse_response(sequence.tokens)
    text = get_text_content(message)
    return Answer(tuple(prompt), tuple(sequence.tokens), text, sequence.stop_reason == "length")

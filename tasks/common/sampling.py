"""Sampling clients, completions of conversations, and scores of given completions."""

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
from blocks.tinker_internals import BackcompatSamplingClientFuture
from tasks.common.prompt_scores import score_last_tokens
from tasks.common.service_errors import service_errors
from tasks.common.tokenizers import lock_tokenizers


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        num_samples: answers per conversation.
        max_tokens: maximum tokens of an answer; longer answers are truncated.
        temperature: 0 is greedy decoding, 1 samples from the policy's own distribution.
        seed: random seed; the same policy and seed give the same answers, up to the rounding of the service.
    """

    num_samples: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled answer.

    Attributes:
        prompt: tokens of the prompt.
        tokens: tokens of the answer, including the stop token.
        text: text of the answer.
        truncated: True if the answer reached `max_tokens`.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    truncated: bool


def open_renderer(name: str, tokenizer: Tokenizer) -> Renderer:
    """Open a renderer by name.

    Raises:
        ConfigError: the renderer does not exist or needs another tokenizer.
    """
    try:
        return get_renderer(name, tokenizer)
    except (TinkerCookbookError, ValueError, KeyError, AssertionError) as error:
        raise ConfigError(
            f"renderer_name is {name!r}, which cannot be used with the model's tokenizer ({reason(error)}): give a "
            "renderer of tinker-cookbook that suits the model, such as qwen3_instruct for ChatML."
        ) from error


async def sample_answers(
    sampler: tinker.SamplingClient, renderer: Renderer, conversations: Sequence[Sequence[Message]], sampling: Sampling
) -> list[list[Answer]]:
    """Sample `num_samples` answers to each conversation; return them as ``[P][G]`` in the same order."""

    async def answer(index: int, messages: Sequence[Message]) -> list[Answer]:
        prompt = renderer.build_generation_prompt(list(messages))
        response = await sampler.sample(
            prompt=prompt,
            num_samples=sampling.num_samples,
            sampling_params=types.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                # Sample n of a request has the request's seed plus n, so prompts never share seeds.
                seed=sampling.seed + index * sampling.num_samples,
                stop=renderer.get_stop_sequences(),
            ),
        )
        return [_answer(renderer, prompt.to_ints(), sequence) for sequence in response.sequences]

    return list(await asyncio.gather(*(answer(index, messages) for index, messages in enumerate(conversations))))


async def score_answers(
    sampler: tinker.SamplingClient, answers: Sequence[Answer], *, can_score_last_n: bool = False
) -> list[list[float]]:
    """Return the policy's logprob of each token of each answer, in nats.

    Args:
        can_score_last_n: True if the service can return the logprobs of the last tokens alone (`supports_last_n`).

    Raises:
        PoisonedError: a logprob is not finite.
    """

    async def score(answer: Answer) -> list[float]:
        tokens = types.ModelInput.from_ints([*answer.prompt, *answer.tokens])
        logprobs = await score_last_tokens(sampler, tokens, len(answer.prompt), can_score_last_n=can_score_last_n)
        values = [math.nan if value is None else value for value in logprobs[len(answer.prompt) :]]
        if not all(math.isfinite(value) for value in values):
            bad = next(value for value in values if not math.isfinite(value))
            raise PoisonedError(f"The policy gives the logprob {bad} to a token of an answer: check its weights.")
        return values

    return list(await asyncio.gather(*(score(answer) for answer in answers)))


def wait_for_snapshot(snapshot: BackcompatSamplingClientFuture) -> tinker.SamplingClient:
    """Wait for a sampling client of a snapshot.

    Raises:
        ServiceError: the service failed to take the snapshot.
    """
    with service_errors("take a snapshot of the weights to sample from"):
        return snapshot.result()


def _answer(renderer: Renderer, prompt: list[int], sequence: types.SampledSequence) -> Answer:
    message, _ = renderer.parse_response(sequence.tokens)
    text = get_text_content(message)
    return Answer(tuple(prompt), tuple(sequence.tokens), text, sequence.stop_reason == "length")


def open_training_client(session: tinker.ServiceClient, path: str, model: str) -> tinker.TrainingClient | None:
    """Open a client for forward passes; return None if the weights can only be sampled from.

    Args:
        path: checkpoint, `tinker://...`; empty for the base model.
        model: base model by the service's name.

    Raises:
        ServiceError: the service failed or does not have the weights.
    """
    lock_tokenizers()
    if "/sampler_weights/" in path:
        return None
    with service_errors(f"load {path or model}"):
        if not path:
            # An untrained adapter does not change the base model.
            return session.create_lora_training_client(model, rank=1, seed=0).result()
        return session.create_training_client_from_state(path).result()


def open_sampler(session: tinker.ServiceClient, path: str, model: str) -> tuple[tinker.SamplingClient, Tokenizer]:
    """Open a sampling client of the weights; return it with the model's tokenizer. Arguments as `open_training_client`.

    Raises:
        ServiceError: the service failed or does not have the weights.
    """
    training_client = open_training_client(session, path, model)
    with service_errors(f"load {path or model} for sampling"):
        if training_client is None:
            sampler = session.create_sampling_client(model_path=path).result()
            return sampler, sampler.get_tokenizer()
        # Also for a base model: a sampling client opened by name cannot load the tokenizers of the engine's own models.
        return training_client.save_weights_and_get_sampling_client().result(), training_client.get_tokenizer()

"""Training data that a model generates: sampled once and cached in the run's directory."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import chz
import datasets
import tinker
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder
from tqdm import tqdm

from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from objectives.jsonl_cache import JsonlCache
from tasks.common.datum_cache import load_cache, save_cache
from tasks.common.event_loop import run_coroutine
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import Sampling, sample_answers
from tasks.common.service_errors import service_errors
from tasks.common.task import call, opaque_argument, retried_task
from tasks.training.token_meter import TokenMeter, open_counted_sampler

WRITTEN_NAME = "written.jsonl"

Conversation = Sequence[Message]

# Conversations between two saves of the cache; a killed run loses at most the answers to this many.
_CHUNK = 32


@dataclass(frozen=True, slots=True)
class AnswerSampler:
    """Model that answers conversations.

    Attributes:
        name: checkpoint path or model name, part of the cache keys.
        sampler: client of its weights.
        renderer: renderer of its chat format.
    """

    name: str
    sampler: tinker.SamplingClient
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class CachedSampler:
    """Answer sampler with a cache in a file of the run's directory."""

    model: AnswerSampler
    cache: JsonlCache
    directory: RunDirectory

    def sample(self, conversations: Sequence[Conversation], sampling: Sampling) -> list[list[str]]:
        """Sample complete, non-empty answers to each conversation; cached answers are reused."""
        keys = [self._find_key(conversation, sampling) for conversation in conversations]
        cached = self.cache.find(keys)
        new = {key: messages for key, messages in zip(keys, conversations, strict=True) if key not in cached}
        # The run's own progress bar starts with the first step, after this bar has ended.
        with tqdm(desc=f"sampling from {self.model.name}", total=len(new), unit="prompt", disable=not new) as bar:
            for start in range(0, len(new), _CHUNK):
                chunk = dict(list(new.items())[start : start + _CHUNK])
                self.cache.put(call(generate, self.model, opaque_argument(chunk), sampling))
                call(save_cache, self.cache, self.directory, WRITTEN_NAME)
                bar.update(len(chunk))
        answers = self.cache.find(keys)
        return [answers[key] for key in keys]

    def _find_key(self, conversation: Conversation, sampling: Sampling) -> str:
        """Cache key of the answers to a conversation: a digest of the prompt that the model gets.

        Keys of earlier releases had the messages instead. They stay valid, because a run of an earlier release would
        not resume with other answers; if it starts over with another renderer, it keeps the earlier answers.
        """
        renderer = self.model.renderer
        prompt = renderer.build_generation_prompt(list(conversation)).to_ints()
        keys = [
            hashlib.sha256(f"{self.model.name}\0{sampling!r}\0{text}".encode()).hexdigest()
            for text in (json.dumps([prompt, renderer.get_stop_sequences()]), json.dumps(list(conversation)))
        ]
        return next((key for key in keys if self.cache.find([key])), keys[0])


@retried_task(name="write")
def generate(model: AnswerSampler, conversations: dict[str, Conversation], sampling: Sampling) -> dict[str, list[str]]:
    """Sample complete, non-empty answers to conversations by key; the keys determine the seeds.

    Raises:
        ServiceError: the service failed.
    """

    async def answer(key: str, conversation: Conversation) -> list[str]:
        seeded = replace(sampling, seed=int(key[:7], 16))
        (answers,) = await sample_answers(model.sampler, model.renderer, [conversation], seeded)
        return [answer.text for answer in answers if not answer.truncated and answer.text.strip()]

    async def answer_all() -> list[list[str]]:
        return list(await asyncio.gather(*(answer(key, messages) for key, messages in conversations.items())))

    with service_errors(f"sample training data from {model.name}"):
        return dict(zip(conversations, run_coroutine(answer_all()), strict=True))


@chz.chz
class GeneratedDataBuilder(ChatDatasetBuilder):
    """Base class of builders of supervised data that a model generates.

    Attributes:
        teacher: checkpoint of the generating model, `tinker://...`; empty for the base model.
        teacher_model: base model of the generating model, by the service's name; the trained model by default.
        max_tokens: maximum tokens of an answer; truncated answers are not used.
        temperature: sampling temperature.
        seed: seed of the samples and of random choices.
        base_model: filled in by the run.
        session, token_meter: filled in by the run.
        directory: filled in by the run.
    """

    teacher: str = ""
    teacher_model: str = ""
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    base_model: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    token_meter: TokenMeter | None = chz.field(meta_factory=None, default=None)
    directory: RunDirectory = chz.field(meta_factory=None)

    def open_cached_sampler(self) -> CachedSampler:
        """Open the generating model and load the cache of its answers."""
        model = self.teacher_model or self.base_model
        sampler, tokenizer = open_counted_sampler(self.session, self.teacher, model, self.token_meter)
        is_trained_model = model == self.base_model
        renderer = self.renderer if is_trained_model else get_renderer(renderer_name_of(model, tokenizer), tokenizer)
        cache = JsonlCache()
        load_cache(cache, self.directory, WRITTEN_NAME)
        return CachedSampler(AnswerSampler(self.teacher or model, sampler, renderer), cache, self.directory)

    def sampling(self, num_samples: int = 1) -> Sampling:
        """Sampling parameters for a number of answers."""
        return Sampling(num_samples, self.max_tokens, self.temperature, self.seed)

    def dataset(self, conversations: Sequence[Conversation], batch_size: int) -> SupervisedDatasetFromHFDataset:
        """Dataset that trains on the last message of each conversation.

        Raises:
            ConfigError: `conversations` is empty.
        """
        if not conversations:
            raise ConfigError(
                "No generated answer meets the requirements: raise max_tokens, sample more answers, or relax the "
                "requirements."
            )
        common = self.common_config

        def to_datum(row: dict[str, str]) -> tinker.Datum:
            return conversation_to_datum(json.loads(row["messages"]), self.renderer, common.max_length)

        rows = datasets.Dataset.from_list([{"messages": json.dumps(list(messages))} for messages in conversations])
        return SupervisedDatasetFromHFDataset(rows, batch_size=batch_size, map_fn=to_datum)

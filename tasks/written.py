"""What a model writes for data to be made of: sampled once, and kept with the run."""

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
from objectives.kept import Kept
from tasks.features import load_kept, save_kept
from tasks.options import call, retried_task, whole
from tasks.renderer import renderer_of
from tasks.rollout import run_coroutine
from tasks.sample import Sampling, sample_answers
from tasks.service_errors import service_errors
from tasks.weights import open_sampler

WRITTEN_NAME = "written.jsonl"

Conversation = Sequence[Message]

# What is lost where a run is killed while a model writes.
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Author:
    """A model that answers conversations.

    Attributes:
        name: of its weights.
    """

    name: str
    sampler: tinker.SamplingClient
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class Notebook:
    """What an author has said to conversations, in a file of the run's directory."""

    author: Author
    kept: Kept
    directory: RunDirectory

    def answers(self, conversations: Sequence[Conversation], sampling: Sampling) -> list[list[str]]:
        """Several answers to each, those that have an end; what was said before is not asked for again."""
        keys = [_key(self.author, each, sampling) for each in conversations]
        known = self.kept.find(keys)
        new = {key: each for key, each in zip(keys, conversations, strict=True) if key not in known}
        # Before the first step, whose bar begins only then.
        with tqdm(desc=f"written by {self.author.name}", total=len(new), unit="answered", disable=not new) as bar:
            for start in range(0, len(new), _AT_ONCE):
                asked = dict(list(new.items())[start : start + _AT_ONCE])
                self.kept.keep(call(write, self.author, whole(asked), sampling))
                call(save_kept, self.kept, self.directory, WRITTEN_NAME)
                bar.update(len(asked))
        found = self.kept.find(keys)
        return [found[key] for key in keys]


@retried_task(name="write")
def write(author: Author, asked: dict[str, Conversation], sampling: Sampling) -> dict[str, list[str]]:
    """The answers to conversations by their keys, from which the seeds of their draws follow.

    Raises:
        ServiceError: the service failed.
    """

    async def answer(key: str, conversation: Conversation) -> list[str]:
        seeded = replace(sampling, seed=int(key[:7], 16))
        (found,) = await sample_answers(author.sampler, author.renderer, [conversation], seeded)
        return [each.text for each in found if not each.truncated and each.text.strip()]

    async def answer_all() -> list[list[str]]:
        return list(await asyncio.gather(*(answer(key, each) for key, each in asked.items())))

    with service_errors(f"have {author.name} write"):
        return dict(zip(asked, run_coroutine(answer_all()), strict=True))


@chz.chz
class WrittenBuilder(ChatDatasetBuilder):
    """Supervised data that a model wrote. What is not written here, the run fills in.

    Attributes:
        teacher: checkpoint of who writes, `tinker://...`; empty for the base model.
        teacher_model: base model of who writes, by the service's name; by default the one that is trained.
        max_tokens: of one answer; one that has no end by then is not used.
        temperature: of the sampling.
        seed: of the draws.
        base_model, session, directory: of the run.
    """

    teacher: str = ""
    teacher_model: str = ""
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    base_model: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    directory: RunDirectory = chz.field(meta_factory=None)

    def open_notebook(self) -> Notebook:
        """What the teacher said before, and is asked from now on."""
        model = self.teacher_model or self.base_model
        sampler, tokenizer = open_sampler(self.session, self.teacher, model)
        same = model == self.base_model
        renderer = self.renderer if same else get_renderer(renderer_of(model, tokenizer), tokenizer)
        kept = Kept()
        load_kept(kept, self.directory, WRITTEN_NAME)
        return Notebook(Author(self.teacher or model, sampler, renderer), kept, self.directory)

    def sampling(self, num_samples: int = 1) -> Sampling:
        return Sampling(num_samples, self.max_tokens, self.temperature, self.seed)

    def dataset(self, conversations: Sequence[Conversation], batch_size: int) -> SupervisedDatasetFromHFDataset:
        """Conversations of which the last answer is learned.

        Raises:
            ConfigError: there are none.
        """
        if not conversations:
            raise ConfigError(
                "Nothing that was written is fit to be learned from: raise max_tokens, ask for more samples, or lower "
                "what an answer has to fulfil."
            )
        common = self.common_config

        def read(row: dict[str, str]) -> tinker.Datum:
            return conversation_to_datum(json.loads(row["messages"]), self.renderer, common.max_length)

        rows = datasets.Dataset.from_list([{"messages": json.dumps(list(each))} for each in conversations])
        return SupervisedDatasetFromHFDataset(rows, batch_size=batch_size, map_fn=read)


def _key(author: Author, conversation: Conversation, sampling: Sampling) -> str:
    return hashlib.sha256(f"{author.name}\0{sampling!r}\0{json.dumps(list(conversation))}".encode()).hexdigest()

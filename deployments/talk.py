"""Talk to trained weights in the terminal: answer single prompts, or hold a conversation."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tinker
from tinker_cookbook.renderers import Message, Renderer

from blocks.terminal import TextConsole, escape_json
from deployments.run_lookup import find_run
from flows.config.base import BASE, SERVICE_PATH, WeightsConfig
from flows.config.loader import field_values, validate_fields
from flows.runs.blocks import open_service, storage_of
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint, with_model
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import Answer, Sampling, open_renderer, open_sampler, sample_answers

HELP = (
    "Commands: /reset starts a new conversation with the system prompt of the command line, /system TEXT starts one "
    "with the system prompt TEXT, Ctrl-D ends the chat."
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights to talk to, and their service.

    Attributes:
        checkpoint: `RUN`, `RUN@STEP`, `RUN@best`, `RUN@final`, a `tinker://` path, or `base`.
        model: base model; empty for the model of the run.
        renderer_name: chat format; empty for the format of the run's data, or else the model's format.
        base_url: Tinker service; empty for the service of the run, or else the one that the environment selects.
        storage: storage of the runs.
    """

    checkpoint: str
    model: str = ""
    renderer_name: str = ""
    base_url: str = ""
    storage: str = ""


@dataclass(slots=True)
class Conversation:
    """Conversation with a model; it keeps each message of the user and the reply."""

    sampler: tinker.SamplingClient
    renderer: Renderer
    sampling: Sampling
    messages: list[Message] = field(default_factory=list)

    def reply(self, text: str) -> Answer:
        """Return the reply to a message of the user."""
        self.messages.append({"role": "user", "content": text})
        answer = asyncio.run(sample_answers(self.sampler, self.renderer, [self.messages], self.sampling))[0][0]
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def reset(self, system: str = "") -> None:
        """Forget the conversation; begin the next one with the system prompt, unless it is empty."""
        self.messages = [{"role": "system", "content": system}] if system else []


@contextmanager
def open_conversation(weights: Weights, sampling: Sampling) -> Iterator[Conversation]:
    """Open a conversation with weights.

    Raises:
        ConfigError: the run, checkpoint or renderer does not exist, or the model is unknown.
        ServiceError: the service does not respond.
    """
    recorded = _recorded_fields(weights)
    of_run = {name: recorded[name] for name in ("base_url", "engine") if name in recorded}
    options = {"base_url": weights.base_url, "storage": weights.storage, "model": weights.model}
    config = validate_fields(WeightsConfig, of_run | {name: value for name, value in options.items() if value})
    checkpoint = find_checkpoint(weights.checkpoint, storage_of(config))
    config = with_model(config, checkpoint)
    with open_service(config) as service, service.session() as session:
        sampler, tokenizer = open_sampler(session, checkpoint.path, config.model)
        # The user's choice, else the renderer of the run, else the renderer of the model.
        names = [weights.renderer_name, *field_values(recorded, "renderer_name")]
        name = next((name for name in names if name), None) or renderer_name_of(config.model, tokenizer)
        yield Conversation(sampler, open_renderer(name, tokenizer), sampling)


def show_samples(weights: Weights, prompts: Sequence[str], system: str, sampling: Sampling, *, as_json: bool) -> None:
    """Print the answers to each prompt."""
    with open_conversation(weights, sampling) as conversation:
        conversation.reset(system)
        conversations = [[*conversation.messages, Message(role="user", content=prompt)] for prompt in prompts]
        coroutine = sample_answers(conversation.sampler, conversation.renderer, conversations, sampling)
        answers_PG = asyncio.run(coroutine)
    if as_json:
        rows = [
            {"prompt": prompt, "answer": answer.text, "num_tokens": len(answer.tokens), "truncated": answer.truncated}
            for prompt, answers in zip(prompts, answers_PG, strict=True)
            for answer in answers
        ]
        print(escape_json(json.dumps(rows, indent=2, ensure_ascii=False)))
        return
    console = TextConsole()
    for prompt, answers in zip(prompts, answers_PG, strict=True):
        for answer in answers:
            if len(prompts) > 1:
                console.print(f"> {prompt}", style="bold")
            _print(console, answer, sampling)


def chat(weights: Weights, system: str, sampling: Sampling) -> None:
    """Print a reply to each line of the input, until the input ends (Ctrl-D)."""
    console = TextConsole()
    with open_conversation(weights, sampling) as conversation:
        conversation.reset(system)
        if sys.stdin.isatty():
            console.print(HELP)
        while (line := _read(console)) is not None:
            command, _, argument = line.partition(" ")
            if command in ("/system", "/reset"):
                conversation.reset(argument if command == "/system" else system)
                if sys.stdin.isatty():
                    console.print("(new conversation)", style="dim")
            elif line.startswith("/"):
                console.print(f"Unknown command {command}. {HELP}")
            elif line:
                _print(console, conversation.reply(line), sampling)


def _read(console: TextConsole) -> str | None:
    """Read a line; None at the end of the input."""
    try:
        return console.input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _print(console: TextConsole, answer: Answer, sampling: Sampling) -> None:
    console.print(answer.text)
    if answer.truncated:
        console.print(f"(cut after max_tokens={sampling.max_tokens})", style="dim")


def _recorded_fields(weights: Weights) -> dict[str, Any]:
    """Return the config of the run that the checkpoint names; empty for other weights."""
    if weights.checkpoint == BASE or weights.checkpoint.startswith(SERVICE_PATH):
        return {}
    return find_run(weights.checkpoint.partition("@")[0], weights.storage).fields

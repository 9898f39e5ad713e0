"""Any dataset of reasoning-gym by its name; needs the extra `gym`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import RLDataset

from blocks.errors import ConfigError, reason
from tasks.environments.groups import GroupsBuilder, MakeEnv

HELD_OUT_SEED, EXAMPLES_SEED = 1_000_003, 2_000_003


@dataclass(frozen=True)
class GymEnv(MessageEnv):
    """One problem: what its dataset scores the answer with, from 0 to 1, less `format_coef` where tags are missing."""

    dataset: Any
    entry: dict[str, Any]
    before: tuple[Message, ...]
    tags: bool
    format_coef: float

    async def initial_observation(self) -> list[Message]:
        return [*self.before, Message(role="user", content=self.entry["question"])]

    async def step(self, message: Message) -> MessageStepResult:
        from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

        said = get_text_content(message)
        answer = extract_answer(said) if self.tags else said.strip()
        score, failed = 0.0, False
        if answer is not None:
            try:
                # Some datasets solve something to score it.
                score = float(await asyncio.to_thread(self.dataset.score_answer, answer, self.entry))
            except Exception:  # noqa: BLE001  # their scorers parse whatever a model says, and some raise for it
                failed = True
        formatted = answer is not None
        return MessageStepResult(
            reward=score - self.format_coef * (not formatted),
            episode_done=True,
            next_messages=[],
            metrics={"score": score, "format": float(formatted), "not_scored": float(failed)},
        )


@chz.chz
class GymBuilder(GroupsBuilder):
    """Problems of a dataset of reasoning-gym.

    Attributes:
        dataset: its name, as `chain_sum`.
        config: its own parameters, those that say how difficult it is; for `composite` its `datasets`, each with
            `name`, `weight` and `config`.
        num_problems: what is trained on.
        num_held_out: others, to test on.
        instruction: a system message, or "" for none; None for reasoning-gym's own, which asks for reasoning and then
            the answer in `<answer>` tags.
        num_examples: problems with their answers, not those of the run, that the conversation starts with.
        tags: whether what is in such tags is scored, or else all that is said. Most datasets give a part of the score
            for an answer with other words around it.
        format_coef: what an answer loses without its tags, or without an end.
    """

    dataset: str
    config: Mapping[str, Any] = chz.field(default_factory=dict)
    num_problems: int = 500
    num_held_out: int = 0
    instruction: str | None = None
    num_examples: int = 0
    tags: bool = True
    format_coef: float = 0.1

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        train = self._problems(self.num_problems, self.seed)
        test = self._problems(self.num_held_out, self.seed + HELD_OUT_SEED) if self.num_held_out else []
        return self.training(train, self.dataset), self.held_out(test, self.dataset)

    def _problems(self, size: int, seed: int) -> list[MakeEnv]:
        dataset, default = create(self.dataset, {**self.config, "size": size, "seed": seed})
        before = self._before(default if self.instruction is None else self.instruction)
        renderer = self.renderer()
        return [
            partial(
                EnvFromMessageEnv,
                renderer,
                GymEnv(dataset, dataset[index], before, self.tags, self.format_coef),
                failed_parse_reward=-self.format_coef,
                context_overflow_reward=-self.format_coef,
            )
            for index in range(size)
        ]

    def _before(self, instruction: str) -> tuple[Message, ...]:
        """What the conversation starts with."""
        messages = [Message(role="system", content=instruction)] if instruction else []
        shown, _ = create(self.dataset, {**self.config, "size": self.num_examples or 1, "seed": EXAMPLES_SEED})
        for index in range(self.num_examples):
            answer = shown[index]["answer"]
            said = f"<answer>{answer}</answer>" if self.tags else answer
            messages += [
                Message(role="user", content=shown[index]["question"]),
                Message(role="assistant", content=said),
            ]
        return tuple(messages)


def create(name: str, config: Mapping[str, Any]) -> tuple[Any, str]:
    """A dataset of reasoning-gym, and what it tells a model to do.

    Raises:
        ConfigError: reasoning-gym is not installed, or has no such dataset.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
        from reasoning_gym.utils import SYSTEM_PROMPTS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"The datasets of reasoning-gym need it ({reason(error)}): install it with pip install 'tinker-flows[gym]'."
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(DATASETS))}.")
    if name == "composite":
        config = {
            **config,
            "datasets": [DatasetSpec(**{"weight": 1.0, "config": {}, **each}) for each in config["datasets"]],
        }
    return reasoning_gym.create_dataset(name, **config), SYSTEM_PROMPTS["default"]

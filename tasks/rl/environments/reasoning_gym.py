"""Datasets of reasoning-gym by name; needs the extra `gym`."""

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
from tasks.rl.environments.groups import GroupsBuilder, MakeEnv

HELD_OUT_SEED_OFFSET = 1_000_003  # added to the seed of the training problems
EXAMPLES_SEED = 2_000_003  # seed of the solved examples


@dataclass(frozen=True)
class GymEnv(MessageEnv):
    """One problem: reward is the dataset's score from 0 to 1, minus `format_coef` for a bad format."""

    dataset: Any
    entry: dict[str, Any]
    prefix: tuple[Message, ...]
    tags: bool
    format_coef: float

    async def initial_observation(self) -> list[Message]:
        return [*self.prefix, Message(role="user", content=self.entry["question"])]

    async def step(self, message: Message) -> MessageStepResult:
        from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

        text = get_text_content(message)
        answer = extract_answer(text) if self.tags else text.strip()
        score, failed = 0.0, False
        if answer is not None:
            try:
                # In a thread, because some scorers are slow.
                score = float(await asyncio.to_thread(self.dataset.score_answer, answer, self.entry))
            except Exception:  # noqa: BLE001  # some scorers raise on text that they cannot parse
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
    """Builder of problems from a dataset of reasoning-gym.

    Attributes:
        dataset: name of the dataset, such as `chain_sum`.
        config: parameters of the dataset, such as its difficulty; for `composite` the list `datasets`, whose items have
            `name`, `weight` and `config`.
        num_problems: number of training problems.
        num_held_out: number of other problems to test on.
        instruction: system message; "" for none, None for reasoning-gym's own, which asks for reasoning and then the
            answer in `<answer>` tags.
        num_examples: number of solved examples at the start of the conversation, from another seed than the problems.
        tags: True to score only the text in the tags, False to score the whole reply. Most datasets give partial
            credit for a correct answer with other words around it.
        format_coef: penalty for truncated replies and, if `tags` is true, for replies without tags.
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
        test = self._problems(self.num_held_out, self.seed + HELD_OUT_SEED_OFFSET) if self.num_held_out else []
        return self.training(train, self.dataset), self.held_out(test, self.dataset)

    def _problems(self, size: int, seed: int) -> list[MakeEnv]:
        dataset, default = create_gym_dataset(self.dataset, {**self.config, "size": size, "seed": seed})
        prefix = self._prefix(default if self.instruction is None else self.instruction)
        renderer = self.renderer()
        return [
            partial(
                EnvFromMessageEnv,
                renderer,
                GymEnv(dataset, dataset[index], prefix, self.tags, self.format_coef),
                failed_parse_reward=-self.format_coef,
                context_overflow_reward=-self.format_coef,
            )
            for index in range(size)
        ]

    def _prefix(self, instruction: str) -> tuple[Message, ...]:
        """System message and solved examples."""
        messages = [Message(role="system", content=instruction)] if instruction else []
        if not self.num_examples:
            return tuple(messages)
        config = {**self.config, "size": self.num_examples, "seed": EXAMPLES_SEED}
        examples, _ = create_gym_dataset(self.dataset, config)
        for index in range(self.num_examples):
            answer = examples[index]["answer"]
            reply = f"<answer>{answer}</answer>" if self.tags else answer
            messages += [
                Message(role="user", content=examples[index]["question"]),
                Message(role="assistant", content=reply),
            ]
        return tuple(messages)


def create_gym_dataset(name: str, config: Mapping[str, Any]) -> tuple[Any, str]:
    """Create a dataset of reasoning-gym; return it with reasoning-gym's default instruction.

    Raises:
        ConfigError: reasoning-gym is not installed or has no such dataset.
    """
    try:
        from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]
        from reasoning_gym.utils import SYSTEM_PROMPTS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym cannot be imported ({reason(error)}): install it with pip install 'tinker-flows[gym]'."
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset {name!r}: choose one of {', '.join(sorted(DATASETS))}.")
    if name == "composite":
        config = {
            **config,
            "datasets": [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in config["datasets"]],
        }
    return create_dataset(name, **config), SYSTEM_PROMPTS["default"]

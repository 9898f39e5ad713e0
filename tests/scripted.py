"""A policy that says what a test has it say, in the chat format of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import EnvGroupBuilder

from engine.tiny import byte_tokenizer
from tasks.policy import Policy
from tasks.rollout import Group, Patient, rollout


@dataclass(frozen=True)
class Scripted(Policy):
    """Has the members of a group say their lines, turn by turn."""

    lines: Sequence[Sequence[str]] = ()

    def members(self, attempt: int, num_members: int) -> Sequence[TokenCompleter]:
        return [Speaker(iter(each)) for each in self.lines[:num_members]]


@dataclass(frozen=True)
class Speaker(TokenCompleter):
    """Says one line in each turn."""

    lines: Iterator[str]

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        tokens = byte_tokenizer().encode(next(self.lines) + "<|im_end|>")
        return TokensWithLogprobs(tokens, [-0.1] * len(tokens), "stop")


def play(builder: EnvGroupBuilder, lines: Sequence[Sequence[str]]) -> Group:
    """A group whose members say these lines; what fails is raised."""
    nobody: Any = None
    group = rollout.fn(builder, Scripted(nobody, 0, 1.0, (), lines=lines), Patient(max_retries=0, timeout_s=60), 0, 0)
    assert group.trajectories is not None, group.errors
    return group


def rewards(group: Group) -> list[float]:
    """The total reward of each member."""
    assert group.trajectories is not None
    return group.trajectories.get_total_rewards()


def last_metrics(group: Group, name: str) -> list[float]:
    """A metric of each member's last turn."""
    assert group.trajectories is not None
    return [each.transitions[-1].metrics[name] for each in group.trajectories.trajectories_G]

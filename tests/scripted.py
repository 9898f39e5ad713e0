"""Policy that samples scripted completions, in the chat format of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import EnvGroupBuilder

from engine.tiny import byte_tokenizer
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.group_rollout import Group, RetryWholeGroup, rollout


@dataclass(frozen=True)
class Scripted(SnapshotCompleter):
    """Policy whose group members return their scripted lines, one per turn."""

    lines: Sequence[Sequence[str]] = ()

    def members(self, attempt: int, num_members: int) -> Sequence[TokenCompleter]:
        return [Speaker(iter(lines)) for lines in self.lines[:num_members]]


@dataclass(frozen=True)
class Speaker(TokenCompleter):
    """Completer that returns one line per turn."""

    lines: Iterator[str]

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        tokens = byte_tokenizer().encode(next(self.lines) + "<|im_end|>")
        return TokensWithLogprobs(tokens, [-0.1] * len(tokens), "stop")


def roll_out(builder: EnvGroupBuilder, lines: Sequence[Sequence[str]]) -> Group:
    """Roll out a group whose members return these lines; raise any error."""
    client: Any = None  # a scripted policy samples nothing
    group = rollout.fn(
        builder, Scripted(client, 0, 1.0, (), lines=lines), RetryWholeGroup(max_retries=0, timeout_s=60), 0, 0
    )
    assert group.trajectories is not None, group.errors
    return group


def rewards(group: Group) -> list[float]:
    """Return the total reward of each member."""
    assert group.trajectories is not None
    return group.trajectories.get_total_rewards()


def last_metrics(group: Group, name: str) -> list[float]:
    """Return a metric of each member's last turn."""
    assert group.trajectories is not None
    return [trajectory.transitions[-1].metrics[name] for trajectory in group.trajectories.trajectories_G]

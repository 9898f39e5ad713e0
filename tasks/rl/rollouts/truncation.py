"""Rollouts that reach the token limit: how to recognize them, and the penalty for long completions."""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.rl.types import Trajectory

# Metric of a trajectory: the reward of at most 0 that `OverlongPenalty` adds.
OVERLONG = "overlong/reward"


def is_truncated(trajectory: Trajectory) -> bool:
    """Check whether the last completion of an episode was cut off, so that the episode did not end by itself."""
    return bool(trajectory.transitions) and trajectory.transitions[-1].ac.stop_reason == "length"


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Soft overlong punishment: a penalty that grows linearly as a completion approaches the token limit.

    Source: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476),
    equation 13, with a factor.

    Attributes:
        penalty: penalty of a completion that reaches the limit, in units of reward.
        length: number of tokens before the limit over which the penalty grows from 0 to `penalty`.
        max_tokens: the limit, in tokens per turn.
    """

    penalty: float
    length: int
    max_tokens: int

    def reward(self, trajectory: Trajectory) -> float:
        """Return the reward of an episode, at most 0: the sum of the penalties of its turns, negated."""
        return 0.0 - self.penalty * sum(
            1.0 if turn.ac.stop_reason == "length" else self._share(len(turn.ac.tokens))
            for turn in trajectory.transitions
        )

    def _share(self, num_tokens: int) -> float:
        return min(max(num_tokens - (self.max_tokens - self.length), 0) / self.length, 1.0)

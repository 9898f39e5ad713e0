"""Self-distillation policy optimization (SDPO): the teacher sees how a group's attempts turned out.

The context of a rollout's teacher consists of another rollout of its group that succeeded, and of the environment's
feedback on the rollout itself. Source: Hübotter et al. 2026, "Reinforcement Learning via Self-Distillation"
(arXiv:2601.20802).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tinker
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from tasks.common.jsonl import fill
from tasks.rl.rollouts.group_rollout import Group
from tasks.training.teacher import hard_datum, trained_positions

FEEDBACK = "feedback"

# User messages that end in different ways, because a tokenizer may merge their end with what follows.
_PROBES = ("a", "b.", "?\n", "3")


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Settings of the teacher's context.

    Attributes:
        success_reward: smallest total reward of a successful rollout.
        solution: template of the part with a successful rollout; the field `solution` is its completion.
        feedback: template of the part with the environment's feedback, the field `feedback`.
        closing: text after these two parts.
        renderer: chat format of the environments.
    """

    success_reward: float
    solution: str
    feedback: str
    closing: str
    renderer: Renderer

    def contexts(self, group: Group) -> list[str]:
        """Return the context of each rollout of a group; empty if a rollout has no feedback and no successful peer."""
        assert group.trajectories is not None
        rewards = group.trajectories.get_total_rewards()
        labels_G = group.text_labels_G or ({},) * len(rewards)
        successes = [member for member, reward in enumerate(rewards) if reward >= self.success_reward]
        contexts = []
        for member, labels in enumerate(labels_G):
            others = [success for success in successes if success != member]
            parts = [fill(self.solution, {"solution": self._answer(group, others[0])})] if others else []
            if feedback := labels.get(FEEDBACK):
                parts.append(fill(self.feedback, {"feedback": feedback}))
            contexts.append("".join([*parts, self.closing]) if parts else "")
        return contexts

    def _answer(self, group: Group, member: int) -> str:
        """Text of a rollout's completions, without stop tokens and thinking."""
        assert group.trajectories is not None
        turns = group.trajectories.trajectories_G[member].transitions
        messages = [self.renderer.parse_response(turn.ac.tokens)[0] for turn in turns]
        return "\n\n".join(get_text_content(message).strip() for message in messages)

    def datum(self, datum: tinker.Datum, context: str, tokenizer: Tokenizer) -> tinker.Datum:
        """Return a datum with the context appended to the user's message that precedes the first trained token.

        Raises:
            ConfigError: the prompt does not end with the renderer's start of an answer.
        """
        ending = answer_start(self.renderer)
        tokens = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]
        first = int(trained_positions(datum)[0]) + 1
        place = first - len(ending)
        if place < 0 or tokens[place:first] != ending:
            raise ConfigError(
                f"A prompt of the environments does not end with {tokenizer.decode(ending)!r}, with which an answer "
                "starts in the chat format of hindsight: set hindsight.renderer_name to the renderer of the "
                "environments."
            )
        inserted = tokenizer.encode(context, add_special_tokens=False)
        weights = [0.0, *datum.loss_fn_inputs["weights"].to_torch().tolist()]
        return hard_datum(
            [*tokens[:place], *inserted, *tokens[place:]],
            [*weights[:place], *[0.0] * len(inserted), *weights[place:]],
        )


def answer_start(renderer: Renderer) -> list[int]:
    """Return the tokens between the end of a user's message and the answer, which are the same for all messages."""
    prompts = [renderer.build_generation_prompt([Message(role="user", content=text)]).to_ints() for text in _PROBES]
    return common_end(prompts)


def common_end(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest common end of sequences.

    >>> common_end([[1, 2, 3, 4], [5, 3, 4]])
    [3, 4]
    """
    length = 0
    while length < min(map(len, sequences)) and len({sequence[-1 - length] for sequence in sequences}) == 1:
        length += 1
    return list(sequences[0][len(sequences[0]) - length :])

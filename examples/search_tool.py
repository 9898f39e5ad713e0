"""Questions that only a search answers: who lives where and does what, in a town that was made up.

The model calls `search` with some words and gets the notes that share most of them; its last message has to be
`Answer: ...`. Everything is drawn from the seed, so nothing of it can be known by heart. The turns and the parsing of
calls are tinker-cookbook's.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Annotated

import chz
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.types import Env, RLDataset
from tinker_cookbook.tool_use import ToolResult, build_agent_tool_env, simple_tool_result, tool

from tasks.environments.groups import GroupsBuilder

FIRST = ("Ada", "Bruno", "Celia", "Dario", "Edith", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Leon")
LAST = ("Amsel", "Birk", "Corvin", "Dorn", "Esche", "Falk", "Gruber", "Harms")
FACTS = {
    "street": ("Mill Lane", "Harbour Road", "Chapel Hill", "Orchard Way", "Station Street", "Bridge End"),
    "job": ("baker", "clockmaker", "nurse", "gardener", "ferryman", "teacher", "glazier"),
    "pet": ("parrot", "tortoise", "greyhound", "cat", "pony", "goat"),
}
QUESTIONS = {"street": "On which street does {} live?", "job": "What is {}'s job?", "pet": "Which pet does {} keep?"}
INSTRUCTION = (
    "Answer the question about the people of a small town. Look them up with the search tool first. "
    "End with one line `Answer: ` and the answer alone."
)
NUM_RESULTS = 2


class Town:
    """Everybody's note, and the tool that finds it.

    Attributes:
        people: each one's name and facts.
    """

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        names = [f"{first} {last}" for first in FIRST for last in LAST]
        self.people = {name: {kind: generator.choice(values) for kind, values in FACTS.items()} for name in names}
        self._notes = [
            f"{name} lives on {facts['street']}, works as a {facts['job']} and keeps a {facts['pet']}."
            for name, facts in self.people.items()
        ]

    @tool
    async def search(self, query: Annotated[str, "Words to look for, such as a name."]) -> ToolResult:
        """Search the notes about the people of the town."""
        wanted = _words(query)
        ranked = sorted(self._notes, key=lambda note: -len(wanted & _words(note)))
        return simple_tool_result("\n".join(ranked[:NUM_RESULTS]))


@dataclass(frozen=True)
class AnswerReward:
    """1 for the right answer on a line of its own, less `format_coef` without such a line."""

    expected: str
    format_coef: float

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        said = next(get_text_content(each) for each in reversed(history) if each["role"] == "assistant")
        found = re.findall(r"^Answer: *(.+)$", said, re.MULTILINE)
        correct = bool(found) and found[-1].strip(" .").casefold() == self.expected.casefold()
        searches = sum(each["role"] == "tool" for each in history)
        return correct - self.format_coef * (not found), {
            "correct": float(correct),
            "format": float(bool(found)),
            "searches": float(searches),
        }


@dataclass(frozen=True)
class Ask:
    """Makes a fresh environment of one question."""

    town: Town
    renderer: Renderer
    name: str
    kind: str
    max_turns: int
    format_coef: float

    def __call__(self) -> Env:
        prefix = self.renderer.create_conversation_prefix_with_tools([self.town.search.to_spec()], INSTRUCTION)
        return build_agent_tool_env(
            renderer=self.renderer,
            tools=[self.town.search],
            initial_messages=[*prefix, Message(role="user", content=QUESTIONS[self.kind].format(self.name))],
            reward_fn=AnswerReward(self.town.people[self.name][self.kind], self.format_coef),
            max_turns=self.max_turns,
            failed_parse_reward=-self.format_coef,
            context_overflow_reward=-self.format_coef,
        )


@chz.chz
class SearchBuilder(GroupsBuilder):
    """Three questions about each of 96 people, a sixth of them held out.

    Attributes:
        max_turns: calls and the answer together.
        format_coef: what is lost without an answer in the form that is asked for.
    """

    max_turns: int = 3
    format_coef: float = 0.1

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        town, renderer = Town(self.seed), self.renderer()
        asked = [
            Ask(town, renderer, name, kind, self.max_turns, self.format_coef) for name in town.people for kind in FACTS
        ]
        train, test = [each for each in asked if not _held_out(each)], [each for each in asked if _held_out(each)]
        return self.training(train, "search"), self.held_out(test, "search")


def _held_out(question: Ask) -> bool:
    return question.name.split()[0] in FIRST[-2:]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))

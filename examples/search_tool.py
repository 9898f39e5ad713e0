"""Questions that require a search tool: addresses, jobs and pets of the people of a fictional town.

The model calls `search` with a query and receives the notes that share the most words with the query. Its last message
must have a line `Answer: ...`. All facts are drawn from the seed, so a model cannot know them. tinker-cookbook
runs the conversation and parses the tool calls.
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

from tinker_flows import GroupsBuilder

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
    """Notes about the people of the town, and the tool that searches them.

    Attributes:
        people: facts of each person by name.
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
        words = _words(query)
        ranked = sorted(self._notes, key=lambda note: -len(words & _words(note)))
        return simple_tool_result("\n".join(ranked[:NUM_RESULTS]))


@dataclass(frozen=True)
class AnswerReward:
    """Reward of 1 for the correct answer line; `format_coef` is subtracted if there is no answer line."""

    expected: str
    format_coef: float

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        completion = next(get_text_content(message) for message in reversed(history) if message["role"] == "assistant")
        answers = re.findall(r"^Answer: *(.+)$", completion, re.MULTILINE)
        correct = bool(answers) and answers[-1].strip(" .").casefold() == self.expected.casefold()
        searches = sum(message["role"] == "tool" for message in history)
        return correct - self.format_coef * (not answers), {
            "correct": float(correct),
            "format": float(bool(answers)),
            "searches": float(searches),
        }


@dataclass(frozen=True)
class QuestionEnvFactory:
    """Factory of environments for one question."""

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
    """Builder of three questions about each of 96 people; a sixth of the people are held out.

    Attributes:
        max_turns: maximum number of the model's messages; the answer is one of them, so 3 leaves two tool calls.
        format_coef: penalty for a completion without an answer line.
    """

    max_turns: int = 3
    format_coef: float = 0.1

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        town, renderer = Town(self.seed), self.renderer()
        questions = [
            QuestionEnvFactory(town, renderer, name, kind, self.max_turns, self.format_coef)
            for name in town.people
            for kind in FACTS
        ]
        train = [question for question in questions if not _is_held_out(question)]
        test = [question for question in questions if _is_held_out(question)]
        return self.training(train, "search"), self.held_out(test, "search")


def _is_held_out(question: QuestionEnvFactory) -> bool:
    return question.name.split()[0] in FIRST[-2:]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))

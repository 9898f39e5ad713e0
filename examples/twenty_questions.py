"""tinker-cookbook's twenty questions, with a list of traits instead of a second model as the answerer.

The answer is yes if the question contains a trait of the secret word or the word itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import TwentyQuestionsEnv
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.types import RLDataset

from tinker_flows import GroupsBuilder

WORDS = Path(__file__).parent / "data" / "twenty_questions.jsonl"


@dataclass(frozen=True)
class Answerer(MessageCompleter):
    """Completer that answers a question with yes or no.

    >>> import asyncio
    >>> dog = Answerer(frozenset({"dog", "animal", "pet"}))
    >>> question = [Message(role="user", content="Is it an animal?")]
    >>> asyncio.run(dog(question))["content"]
    'yes'
    """

    traits: frozenset[str]

    async def __call__(self, messages: list[Message]) -> Message:
        words = set(re.findall(r"[a-z]+", get_text_content(messages[-1]).casefold()))
        return Message(role="assistant", content="yes" if words & self.traits else "no")


@dataclass(frozen=True)
class Game:
    """Factory of games about one word."""

    word: str
    traits: Sequence[str]
    renderer: Renderer

    def __call__(self) -> TwentyQuestionsEnv:
        return TwentyQuestionsEnv(Answerer(frozenset({self.word, *self.traits})), self.word, self.renderer)


@chz.chz
class TwentyQuestionsBuilder(GroupsBuilder):
    """Builder of one game per word of a JSONL file with `word` and `traits`.

    Attributes:
        path: JSONL file.
        num_held_out: number of held-out words, taken from the end of the file.
    """

    path: str = str(WORDS)
    num_held_out: int = 4

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = self.renderer()
        rows = [json.loads(line) for line in Path(self.path).read_text().rstrip("\n").split("\n")]
        games = [Game(row["word"], row["traits"], renderer) for row in rows]
        first = len(games) - self.num_held_out
        return self.training(games[:first], "twenty"), self.held_out(games[first:], "twenty")

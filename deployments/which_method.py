"""Which method suits what a user has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from deployments.methods import METHODS


class Have(NamedTuple):
    """One thing that a user may have, and what follows from it.

    Attributes:
        name: of the flag.
        question: to ask for it.
        method: that suits it.
        why: in one sentence.
        example: config to begin with.
    """

    name: str
    question: str
    method: str
    why: str
    example: str


# The first that a user has decides; what follows it can come after.
HAVE = (
    Have(
        "long_prompt",
        "a long prompt that makes the model do what you want",
        "prompt_distillation",
        "The model itself writes the data with the prompt, and learns to do without it: no labels, and every later "
        "request is shorter.",
        "examples/prompt_distillation.yaml",
    ),
    Have(
        "reward",
        "a way to check an answer by a program: tests, a number, a game's end",
        "rl",
        "The model tries, the check rewards, and it may become better than any example you could show it.",
        "examples/rl.yaml",
    ),
    Have(
        "teacher",
        "a stronger model of the same tokenizer that does it well",
        "on_policy_distillation",
        "The teacher says of every token that the student samples how good it is, which teaches more per answer than a "
        "reward for its end; begin with some steps of off_policy_distillation where the student is far away.",
        "examples/on_policy_distillation.yaml",
    ),
    Have(
        "judge",
        "a model that says which of two answers is the better one",
        "rlhf",
        "The judge goes on where pairs end: it compares what the model answers by now, and the distance from where it "
        "began keeps the model from answers that please the judge alone. Pairs of your own train the judge first.",
        "examples/rlhf.yaml",
    ),
    Have(
        "preferences",
        "pairs of answers of which you know the better one",
        "dpo",
        "Pairs say what is better and not what is right, which is what a preference loss reads.",
        "examples/dpo.yaml",
    ),
    Have(
        "demonstrations",
        "answers as you want them",
        "sft",
        "Imitating good answers is the cheapest and steadiest way to them.",
        "examples/sft.yaml",
    ),
)
_ORDER = ("demonstrations", "preferences", "judge", "reward", "teacher", "long_prompt")


class Advice(NamedTuple):
    """What to do.

    Attributes:
        method, why, command: what to run and for which reason; empty where nothing suits.
        before: what to run first, for a better start; empty for nothing.
    """

    method: str
    why: str
    command: str
    before: str = ""


def advise(has: Mapping[str, bool]) -> Advice:
    """The method for what a user has.

    >>> advise({"reward": True, "demonstrations": True})[::3]
    ('rl', 'tinker-flows run sft --config examples/sft.yaml')
    """
    chosen = next((each for each in HAVE if has.get(each.name)), None)
    if chosen is None:
        return Advice("", "Without examples, pairs, a check, a teacher or a prompt there is nothing to learn from.", "")
    # What was imitated first needs less luck to be rewarded, or preferred.
    imitates_first = has.get("demonstrations") and chosen.name in ("reward", "teacher", "preferences")
    before = next(each for each in HAVE if each.name == "demonstrations") if imitates_first else None
    return Advice(chosen.method, chosen.why, _command(chosen), _command(before) if before else "")


def show_advice(has: Mapping[str, bool], as_json: bool) -> None:
    """Print it."""
    advice = advise(has)
    if as_json:
        print(json.dumps(advice._asdict(), indent=2))
        return
    if not advice.method:
        print(advice.why)
        return
    print(f"{advice.method}: {METHODS[advice.method].what}.\n{advice.why}\n\n  {advice.command}")
    if advice.before:
        print("\nFirst imitate the answers that you have, and fork from that run:\n")
        print(f"  {advice.before}\n  {advice.command} resume=THAT_RUN@final")


def _command(have: Have) -> str:
    return f"tinker-flows run {have.method} --config {have.example}"


def asked() -> list[Have]:
    """What to ask for, from the plainest to the rarest."""
    return sorted(HAVE, key=lambda each: _ORDER.index(each.name))

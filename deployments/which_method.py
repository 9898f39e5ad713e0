"""Recommendation of a training method for the data, judge, reward or teacher that a user has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from deployments.methods import METHODS

ROOT = Path(__file__).parents[1]


class Resource(NamedTuple):
    """Source of supervision that a user may have, and the method that suits it.

    Attributes:
        name: name of the command-line flag.
        question: completes "Do you have ...?".
        method: recommended method.
        why: reason for the recommendation.
        example: config file to start from.
        overrides: fields of the config that make it use the resource.
    """

    name: str
    question: str
    method: str
    why: str
    example: str
    overrides: str = ""


# In order of precedence: the first resource that a user has determines the method.
RESOURCES = (
    Resource(
        "long_prompt",
        "a long prompt that makes the model do what you want",
        "prompt_distillation",
        "The model generates its own training data with the prompt and learns to answer without it. You need no "
        "labels, and every later request is shorter.",
        "examples/prompt_distillation.yaml",
    ),
    Resource(
        "teacher",
        "a stronger model with the same tokenizer that does the task well",
        "on_policy_distillation",
        "The teacher scores every token that the student samples, which is denser feedback than one reward per "
        "completion: the Qwen3 report reaches better results than by reinforcement learning with a tenth of the GPU "
        "hours (arXiv:2505.09388). A reward can follow, to pass the teacher. If the student is much weaker, start with "
        "some steps of off_policy_distillation.",
        "examples/on_policy_distillation.yaml",
        "datasets.0.teacher.model=TEACHER",
    ),
    Resource(
        "reward",
        "a program that checks a completion, such as tests, a numeric answer or the result of a game",
        "rl",
        "The model explores, the check rewards it, and it can become better than any example you could write.",
        "examples/rl.yaml",
    ),
    Resource(
        "judge",
        "a model that decides which of two completions is better",
        "rlhf",
        "The judge compares the model's current completions, which a fixed set of pairs cannot do. A KL penalty to the "
        "initial weights keeps the model from exploiting the judge. Your own pairs can train the judge first.",
        "examples/rlhf.yaml",
        "reward={} judge.builder=tinker_flows:PromptedJudgeBuilder judge.params.model=JUDGE",
    ),
    Resource(
        "preferences",
        "pairs of completions where you know the better one",
        "dpo",
        "A preference loss learns directly from pairs, which rank completions without saying what is correct.",
        "examples/dpo.yaml",
    ),
    Resource(
        "demonstrations",
        "examples of the completions you want",
        "sft",
        "Imitating good completions is the cheapest and most stable method.",
        "examples/sft.yaml",
    ),
)
# Field of the chat format in the example of a resource.
_RENDERER_FIELDS = {
    "teacher": "datasets.0.environment.params.renderer_name",
    "reward": "environment.params.renderer_name",
    "preferences": "renderer_name",
}
_QUESTION_ORDER = ("demonstrations", "preferences", "judge", "reward", "teacher", "long_prompt")


_COLLECT = (
    "Collect data first: write down 50 to 100 examples of the completions you want, or, where judging is easier than "
    "writing, compare pairs of completions. Keep some of them for evaluation."
)
_COLLECT_START = (
    "If the model rarely succeeds yet, all completions of a prompt get the same reward, and nothing is learned. Then "
    "collect 50 to 100 examples of good completions first, and train on them with sft."
)


class Advice(NamedTuple):
    """Recommended method.

    Attributes:
        method, why, command: method, reason and command; method and command are empty if no method applies.
        before: command of a run that gives a better start; empty if none is needed.
        start: arguments that let `command` start from the weights of that run; empty if none is needed.
        collect: data worth collecting first; empty if there is enough.
    """

    method: str
    why: str
    command: str
    before: str = ""
    start: str = ""
    collect: str = ""


def advise(available: Mapping[str, bool]) -> Advice:
    """Recommend a method for the available resources, given by name.

    >>> advise({"reward": True, "demonstrations": True})[::3]
    ('rl', 'tinker-flows run sft --config examples/sft.yaml')
    """
    resource = next((resource for resource in RESOURCES if available.get(resource.name)), None)
    if resource is None:
        why = "Training needs examples, pairs, a reward, a judge, a teacher or a prompt to learn from."
        return Advice("", why, "", collect=_COLLECT)
    # A model that has imitated demonstrations reaches rewards and preferred completions sooner.
    imitates_first = available.get("demonstrations") and resource.name in ("reward", "teacher", "preferences")
    first = next(other for other in RESOURCES if other.name == "demonstrations") if imitates_first else None
    before = _command(first) if first else ""
    explores = resource.name in ("reward", "judge") and not available.get("demonstrations")
    start = _start_from(first, resource) if first else ""
    return Advice(resource.method, resource.why, _command(resource), before, start, _COLLECT_START if explores else "")


def show_advice(available: Mapping[str, bool], as_json: bool) -> None:
    """Print the recommendation for the available resources."""
    advice = advise(available)
    if as_json:
        print(json.dumps(advice._asdict(), indent=2))
        return
    if not advice.method:
        print(f"{advice.why}\n{advice.collect}")
        return
    print(f"{advice.method}: {METHODS[advice.method].description}.\n{advice.why}\n\n  {advice.command}")
    if advice.before:
        print("\nFirst train on your demonstrations, then start from those weights:\n")
        print(f"  {advice.before}\n  {advice.command} {advice.start}")
    if advice.collect:
        print(f"\n{advice.collect}")


def _command(resource: Resource) -> str:
    return f"tinker-flows run {resource.method} --config {resource.example} {resource.overrides}".rstrip()


def _start_from(first: Resource, resource: Resource) -> str:
    """Return the arguments that let the example of a resource start from the weights of the first example."""
    fields = yaml.safe_load((ROOT / first.example).read_text())
    renderer_name = fields["data"]["params"]["common_config"]["renderer_name"]
    return (
        f"init_from={fields['run_name']} model={fields['model']} lora_rank={fields['lora_rank']} "
        f"{_RENDERER_FIELDS[resource.name]}={renderer_name}"
    )


def questions() -> list[Resource]:
    """Return the resources in the order to ask about them, from the most common to the rarest."""
    return sorted(RESOURCES, key=lambda resource: _QUESTION_ORDER.index(resource.name))

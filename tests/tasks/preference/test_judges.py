"""Prompted judges: marked verdicts, guidance, position bias, and replies without a verdict."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from scripted import rewards, roll_out
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.preference.types import Comparison
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.rl.preference_envs import PairwisePreferenceGroupBuilder, TournamentPattern

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from tasks.preference.judges import (
    JudgeGuidance,
    build_judge,
    completer_judge,
    parse_verdict,
    record_verdicts,
)
from tasks.preference.preference_models import JudgedPreference
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import compute_group_metrics
from tasks.rl.transcripts.rollout_log import Transcript
from tasks.rl.transcripts.rollout_page import transcript_page

ROW = {"question": "Which?"}
TOKENIZER: Any = byte_tokenizer()


class Replies(MessageCompleter):
    """Judge that prefers the longer answer and replies by a template with `{better}`."""

    def __init__(self, template: str = "{better} is a better answer: [[{better}]]") -> None:
        self.template = template
        self.prompts: list[str] = []

    async def __call__(self, messages: list[Message]) -> Message:
        self.prompts.append(get_text_content(messages[0]))
        first, second = self.prompts[-1].split("Answer A:\n")[1].split("\n\nAnswer B:\n")
        better = "A" if len(first) > len(second) else "B" if len(second) > len(first) else "tie"
        return Message(role="assistant", content=self.template.format(better=better))


def judge(completer: MessageCompleter, first: str, second: str) -> float:
    async def call() -> float:
        return await completer_judge(completer)(ROW, first, second)

    return asyncio.run(call())


def test_a_judge_gets_the_whole_prompt() -> None:
    rows: list[Mapping[str, str]] = []

    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        rows.append(row)
        return 1.0

    turns = [("system", "Answer in French."), ("user", "I am Rex."), ("assistant", "Bonjour."), ("user", "Who am I?")]
    prompt = [Message(role=role, content=content) for role, content in turns]
    answers = [[Message(role="assistant", content=text)] for text in ("Rex.", "Max.")]
    for conversation in (prompt, prompt[1:2]):
        assert asyncio.run(JudgedPreference(judge)(Comparison(conversation, *answers))) == -1.0
    whole = "system: Answer in French.\n\nuser: I am Rex.\n\nassistant: Bonjour.\n\nuser: Who am I?"
    assert rows[0] == {"question": "Who am I?", "conversation": whole}
    assert rows[1] == {"question": "I am Rex.", "conversation": "I am Rex."}


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("[[A]]", 1.0),
        ("B is a better answer: [[B]]", 0.0),
        ("Not [[A]], but [[b]]", 0.0),
        ("A tie would be unfair to a good answer. [[ A ]]", 1.0),
        ("[[Tie]]", 0.5),
        ("A", None),
        ("B is a better answer", None),
        ("It is a tie", None),
        ("[[C]] [A]", None),
        ("", None),
    ],
)
def test_only_marks_are_verdicts(reply: str, verdict: float | None) -> None:
    assert parse_verdict(reply) == verdict


def test_perfect_judge_is_always_right() -> None:
    pairs = ("longer", "short"), ("short", "longer"), ("same", "same")
    for template in ("{better} is a better answer: [[{better}]]", "[[{better}]] is a better answer"):
        assert [judge(Replies(template), *pair) for pair in pairs] == [1.0, 0.0, 0.5]


def test_both_orders_are_asked_and_position_bias_is_measured() -> None:
    completer = Replies("[[A]]")
    with record_verdicts() as record:
        assert judge(completer, "x", "yy") == 0.5
    answers = [prompt.split("Answer A:\n")[1] for prompt in completer.prompts]
    assert sorted(answers) == ["x\n\nAnswer B:\nyy", "yy\n\nAnswer B:\nx"]
    assert record.metrics() == {"judge/unparsed": 0, "judge/position_bias": 1}
    for template, bias in (("[[B]]", -1), ("[[tie]]", 0), ("[[{better}]]", 0)):
        with record_verdicts() as record:
            judge(Replies(template), "x", "yy")
        assert record.metrics()["judge/position_bias"] == bias
    with record_verdicts() as record:
        pass
    assert record.metrics() == {}


def test_criteria_and_principles_are_in_the_prompt() -> None:
    completer = Replies()
    guidance = JudgeGuidance(["It is correct."], ["Be kind.", "Use {braces}."])
    asyncio.run(_call(completer_judge(completer, guidance)))
    for prompt in completer.prompts:
        assert all(f"\n- {line}\n" in prompt for line in ("It is correct.", "Be kind.", "Use {braces}."))
    params = {"criteria": ["It is correct."], "template": "[[A]]"}
    assert asyncio.run(_call(build_judge(f"{__name__}:Replies", params))) == 0.5
    with pytest.raises(ConfigError, match="is not prompted with criteria or principles"):
        build_judge(f"{__name__}:function_builder", {"criteria": ["It is correct."]})


def test_replies_without_a_verdict_are_counted_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        group = _tournament(Replies("I like a <b>short</b> answer"))
    assert rewards(group) == [0, 0]
    # Two ordered pairs of two completions, each asked in both orders.
    metrics = compute_group_metrics([group])
    assert metrics["rollout_errors/UnparsedVerdict"] == 4
    assert metrics["env/all/judge/unparsed"] == 1
    assert "env/all/judge/position_bias" not in metrics
    page = transcript_page(TOKENIZER, 0, Transcript([group], {}, {}))
    assert page.count("UnparsedVerdict: I like a &lt;b&gt;short&lt;/b&gt; answer") == 4
    assert caplog.text.count("has no verdict and counts as a tie: 'I like a <b>short</b> answer'") == 4


def test_tournament_rewards_the_better_completion() -> None:
    group = _tournament(Replies())
    assert rewards(group) == [-1, 1]
    metrics = compute_group_metrics([group])
    assert metrics["rollout_errors/total"] == 0
    assert (metrics["env/all/judge/unparsed"], metrics["env/all/judge/position_bias"]) == (0, 0)


def function_builder() -> Any:
    return lambda row, first, second: 1.0


async def _call(judge: Any) -> float:
    return await judge(ROW, "x", "yy")


def _tournament(completer: MessageCompleter) -> Group:
    renderer = get_renderer("qwen3_instruct", TOKENIZER)
    builder = PairwisePreferenceGroupBuilder(
        convo_prefix=[Message(role="user", content="Which?")],
        policy_renderer=renderer,
        tournament_pattern=TournamentPattern.ALL_PAIRS_BOTH_WAYS,
        preference_model=JudgedPreference(completer_judge(completer)),
        num_envs=2,
    )
    return roll_out(builder, [["short"], ["longer"]])

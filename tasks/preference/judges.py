"""Judges that compare two answers: functions, preference models and prompted models."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.preference.types import Comparison, PreferenceModel, PreferenceModelBuilder
from tinker_cookbook.renderers import Message, get_text_content

from blocks.errors import ConfigError, TinkerFlowsError, UserCodeError
from tasks.common.builders import import_builder, import_object
from tasks.common.graders import same_number

logger = logging.getLogger(__name__)

# Function of a row and two answers to its question: 1 if the first answer is better, 0 if the second is, 0.5 for a tie.
Judge = Callable[[Mapping[str, str], str, str], Awaitable[float]]

_PROMPT = """Compare two answers to a question.{guidance}
End your reply with your verdict in double square brackets: [[A]] if answer A is better, [[B]] if answer B is better, \
[[tie]] if they are equally good.

Question:
{question}

Answer A:
{first}

Answer B:
{second}"""
_VERDICT = re.compile(r"\[\[\s*(a|b|tie)\s*\]\]", re.IGNORECASE)
_VERDICTS = {"a": 1.0, "b": 0.0, "tie": 0.5}
_PREVIEW = 500  # characters of a reply in the log


@dataclass(frozen=True, slots=True)
class JudgeGuidance:
    """Guidance in the prompt of a judge.

    Attributes:
        criteria: criteria by which the answers are compared.
        principles: principles that a good answer follows.
    """

    criteria: Sequence[str] = ()
    principles: Sequence[str] = ()

    def __str__(self) -> str:
        return _bullets("Compare them by these criteria:", self.criteria) + _bullets(
            "A good answer follows these principles:", self.principles
        )


@dataclass(slots=True)
class JudgeRecord:
    """Replies of prompted judges while `record_verdicts` is open.

    Attributes:
        verdicts: verdicts on the answer shown first: 1 if it is better, 0 if the other is, 0.5 for a tie.
        unparsed: replies without a verdict.
    """

    verdicts: list[float] = field(default_factory=list)
    unparsed: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Metrics of the replies; empty if no prompted judge replied.

        `judge/unparsed` is the share of replies without a verdict. `judge/position_bias` is the share of verdicts for
        the answer shown first minus the share for the other, from -1 to 1. It is 0 for a judge without a position bias,
        because each pair is shown in both orders.
        """
        num_replies = len(self.verdicts) + len(self.unparsed)
        metrics = {"judge/unparsed": len(self.unparsed) / num_replies} if num_replies else {}
        if self.verdicts:
            metrics["judge/position_bias"] = 2 * sum(self.verdicts) / len(self.verdicts) - 1
        return metrics


NO_GUIDANCE = JudgeGuidance()
_RECORD: ContextVar[JudgeRecord | None] = ContextVar("judge_record", default=None)


@contextmanager
def record_verdicts() -> Iterator[JudgeRecord]:
    """Record the replies of all prompted judges in this context and the tasks that it starts."""
    record = JudgeRecord()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def by_answer(row: Mapping[str, str], first: str, second: str) -> float:
    """Judge by the final number of the row's `answer`; a tie if both answers or neither give it.

    >>> by_answer({"answer": "#### 4"}, "It is 4.", "It is 5.")
    1.0
    """
    right = [same_number(answer, row["answer"]) for answer in (first, second)]
    return 0.5 + 0.5 * (right[0] - right[1])


def build_judge(builder: str, params: Mapping[str, Any]) -> Judge:
    """Build a judge by import path.

    The object at the path, or the result of calling it with `params`, is one of these:

    - a function of a row and two answers that returns a number from 0 to 1, sync or async;
    - a `PreferenceModel` of tinker-cookbook, or a builder of one;
    - a `MessageCompleter`, which is prompted for a verdict. The parameters `criteria` and `principles`, lists of
      sentences, go into its prompt.

    Preference models and completers judge both orders, so that a position bias cancels.

    Raises:
        ConfigError: the judge does not exist, cannot be built, has another type, or is no completer but gets `criteria`
            or `principles`.
    """
    judge = import_object(builder, "judge.builder")
    params, guidance = _split_guidance(judge, params)
    if params or isinstance(judge, type):
        import_builder(builder, "judge.builder", (PreferenceModel, PreferenceModelBuilder, MessageCompleter))
    try:
        if params or isinstance(judge, type):
            judge = judge(**params)
        if isinstance(judge, PreferenceModelBuilder):
            judge = judge()
    except TinkerFlowsError:
        raise
    except Exception as error:  # third-party code called with the user's parameters
        raise ConfigError(
            f"The judge {builder} could not be built ({type(error).__name__}: {error}): check judge.params."
        ) from error
    if isinstance(judge, MessageCompleter):
        return completer_judge(judge, guidance)
    if guidance != NO_GUIDANCE:
        raise ConfigError(
            f"The judge {builder} is a {type(judge).__name__}, which is not prompted with criteria or principles: "
            "remove them from judge.params."
        )
    if isinstance(judge, PreferenceModel):
        return _preference_model_judge(judge)
    if not callable(judge):
        raise ConfigError(
            f"The judge {builder} is a {type(judge).__name__}: give a function, a PreferenceModel or a "
            "MessageCompleter."
        )
    return _function_judge(builder, judge)


def _split_guidance(judge: Any, params: Mapping[str, Any]) -> tuple[dict[str, Any], JudgeGuidance]:
    """Split the guidance from the judge's parameters; a parameter of the judge itself is no guidance."""
    guidance = {name: params[name] for name in ("criteria", "principles") if name in params}
    if guidance and callable(judge):
        own = inspect.signature(judge).parameters
        guidance = {name: value for name, value in guidance.items() if name not in own}
    return {name: value for name, value in params.items() if name not in guidance}, JudgeGuidance(**guidance)


def _function_judge(builder: str, function: Callable[..., Any]) -> Judge:
    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        try:
            verdict = function(row, first, second)
            verdict = float(await verdict if inspect.isawaitable(verdict) else verdict)
        except TinkerFlowsError:
            raise
        except Exception as error:  # user code called with sampled text
            raise UserCodeError(f"The judge {builder} failed ({type(error).__name__}: {error}): fix it.") from error
        if not 0 <= verdict <= 1:
            raise ConfigError(f"The judge {builder} returned {verdict}: return a number from 0 to 1.")
        return verdict

    return judge


def _preference_model_judge(model: PreferenceModel) -> Judge:
    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        answers = [Message(role="assistant", content=answer) for answer in (first, second)]
        comparison = Comparison([Message(role="user", content=row["question"])], answers[:1], answers[1:])
        # A preference model returns -1 for the first answer to 1 for the second.
        return (2 - await model(comparison) + await model(comparison.swap())) / 4

    return judge


def judge_message(guidance: JudgeGuidance, question: str, first: str, second: str) -> Message:
    """Return the message that asks a model for a verdict."""
    content = _PROMPT.format(guidance=guidance, question=question, first=first, second=second)
    return Message(role="user", content=content)


def completer_judge(completer: MessageCompleter, guidance: JudgeGuidance = NO_GUIDANCE) -> Judge:
    """Judge that prompts a model for a verdict in both orders.

    The last of `[[A]]`, `[[B]]` and `[[tie]]` in a reply is the verdict. A reply without one counts as a tie; it is
    logged and recorded by `record_verdicts`.
    """

    async def prompt(question: str, first: str, second: str) -> float:
        reply = get_text_content(await completer([judge_message(guidance, question, first, second)]))
        verdict = parse_verdict(reply)
        record = _RECORD.get()
        if verdict is None:
            logger.warning("A reply of the judge has no verdict and counts as a tie: %r", reply[-_PREVIEW:])
            if record:
                record.unparsed.append(reply)
            return _VERDICTS["tie"]
        if record:
            record.verdicts.append(verdict)
        return verdict

    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        forward, backward = await asyncio.gather(
            prompt(row["question"], first, second), prompt(row["question"], second, first)
        )
        return (forward + 1 - backward) / 2

    return judge


def parse_verdict(reply: str) -> float | None:
    """Return the last marked verdict of a reply: 1 for A, 0 for B, 0.5 for a tie; None without a mark.

    >>> parse_verdict("B is a better answer: [[B]]")
    0.0
    >>> parse_verdict("B is a better answer.")
    """
    marks = _VERDICT.findall(reply)
    return _VERDICTS[marks[-1].lower()] if marks else None


def _bullets(title: str, items: Sequence[str]) -> str:
    return "".join(["\n\n", title, *(f"\n- {item}" for item in items), "\n"]) if items else ""

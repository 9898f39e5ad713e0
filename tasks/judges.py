"""Judges: which of two answers is the better one. A function, a preference model or a model that is asked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.preference.types import Comparison, PreferenceModel, PreferenceModelBuilder
from tinker_cookbook.renderers import Message, get_text_content

from blocks.errors import ConfigError, TinkerFlowsError
from tasks.data import import_object
from tasks.graders import same_number

# Of the row that was asked and two answers to it: 1 where the first one is better, 0 where the second one is.
Judge = Callable[[Mapping[str, str], str, str], Awaitable[float]]

_ASK = """Which answer to this question is better? Say A, B or tie, and nothing else.

Question:
{question}

Answer A:
{first}

Answer B:
{second}"""
_VERDICTS = {"a": 1.0, "b": 0.0, "tie": 0.5}


def by_answer(row: Mapping[str, str], first: str, second: str) -> float:
    """The one whose final number is that of the row's `answer`; a tie where both or neither have it.

    >>> by_answer({"answer": "#### 4"}, "It is 4.", "It is 5.")
    1.0
    """
    right = [same_number(answer, row["answer"]) for answer in (first, second)]
    return 0.5 + 0.5 * (right[0] - right[1])


def build_judge(builder: str, params: Mapping[str, Any]) -> Judge:
    """A judge by import path.

    It is a function of a row and two answers to a number from 0 to 1, which may be async; or what a call with `params`
    returns: such a function, a `PreferenceModel` of tinker-cookbook or a builder of one, or a `MessageCompleter`, which
    is asked. Judges that may favour a place are asked in both orders.

    Raises:
        ConfigError: there is none, or it is none of these.
    """
    found = import_object(builder, "judge.builder")
    try:
        if params or isinstance(found, type):
            found = found(**params)
        if isinstance(found, PreferenceModelBuilder):
            found = found()
    except TinkerFlowsError:
        raise
    except Exception as error:  # somebody else's code, called with the user's parameters
        raise ConfigError(
            f"The judge {builder} could not be built ({type(error).__name__}: {error}): check judge.params."
        ) from error
    if isinstance(found, PreferenceModel):
        return _of_preferences(found)
    if isinstance(found, MessageCompleter):
        return ask_completer(found)
    if not callable(found):
        raise ConfigError(
            f"The judge {builder} is a {type(found).__name__}, where a function, a PreferenceModel or a "
            "MessageCompleter is expected."
        )
    return _checked(builder, found)


def _checked(builder: str, function: Callable[..., Any]) -> Judge:
    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        try:
            verdict = function(row, first, second)
            verdict = float(await verdict if inspect.isawaitable(verdict) else verdict)
        except TinkerFlowsError:
            raise
        except Exception as error:  # somebody else's code, given whatever models say
            raise ConfigError(f"The judge {builder} failed ({type(error).__name__}: {error}): mend it.") from error
        if not 0 <= verdict <= 1:
            raise ConfigError(f"The judge {builder} said {verdict}, where a number from 0 to 1 is expected: mend it.")
        return verdict

    return judge


def _of_preferences(model: PreferenceModel) -> Judge:
    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        said = [Message(role="assistant", content=answer) for answer in (first, second)]
        comparison = Comparison([Message(role="user", content=row["question"])], said[:1], said[1:])
        # From -1 for the first to 1 for the second.
        return (2 - await model(comparison) + await model(comparison.swap())) / 4

    return judge


def ask_completer(completer: MessageCompleter) -> Judge:
    """A judge that asks a model for A, B or tie, in both orders."""

    async def ask(question: str, first: str, second: str) -> float:
        content = _ASK.format(question=question, first=first, second=second)
        said = get_text_content(await completer([Message(role="user", content=content)]))
        found = re.findall(r"\b(a|b|tie)\b", said.lower())
        # What is no verdict is none for anybody.
        return _VERDICTS[found[-1]] if found else 0.5

    async def judge(row: Mapping[str, str], first: str, second: str) -> float:
        forward, backward = await ask(row["question"], first, second), await ask(row["question"], second, first)
        return (forward + 1 - backward) / 2

    return judge

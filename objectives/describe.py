"""What a term says of itself: its first line, and each parameter with type, default and meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from objectives.estimators import ESTIMATORS
from objectives.term import Term


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a term, as text.

    Attributes:
        name: its keyword.
        type: as written in Python, with its limits.
        default: as written in Python; empty where it has to be given.
        description: that of its ``Field``, else its entry under ``Args:`` in the docstring of a function that takes it.
    """

    name: str
    type: str
    default: str
    description: str


def first_line(term: Term) -> str:
    """The first sentence of a term's docstring; empty where it has none.

    >>> from objectives.terms.confidence import confidence
    >>> first_line(confidence)[:44]
    '``p log p`` of each target token, nats, ``(N'
    """
    return (inspect.getdoc(term.evaluate) or "").partition("\n")[0]


def parameters_of(term: Term) -> list[Parameter]:
    """All parameters of a term, those of its estimator among them.

    >>> from objectives.terms.logic import logic
    >>> [(each.name, each.type, each.default) for each in parameters_of(logic)][-1:]
    [('alpha', 'float > 0', '1.0')]
    """
    parts = (term.evaluate, term.prepare, ESTIMATORS[term.estimator] if term.estimator else None)
    written = _documented(*(part for part in parts if part))
    return [
        Parameter(
            name,
            _type(field),
            "" if field.is_required() else repr(field.get_default(call_default_factory=True)),
            field.description or written.get(name, ""),
        )
        for name, field in term.params.model_fields.items()
    ]


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{sign} {getattr(limit, key)}"
        for limit in field.metadata
        for key, sign in signs.items()
        if hasattr(limit, key)
    ]
    return " ".join([name, " and ".join(limits)]).strip()


def _documented(*functions: Callable[..., Any]) -> dict[str, str]:
    """The entries under ``Args:`` of some docstrings, each on one line."""
    entries: dict[str, str] = {}
    for function in functions:
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.getdoc(function) or "", re.MULTILINE)
        for entry in re.finditer(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE):
            entries.setdefault(entry[1], " ".join(entry[2].split()))
    return entries

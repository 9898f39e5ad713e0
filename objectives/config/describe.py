"""Descriptions of terms for forms and docs: summary line and parameters."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from objectives.term import Term, definition_of, estimator_functions


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a term, as text.

    Attributes:
        name: keyword.
        type: Python type with limits.
        default: Python expression; empty for a required parameter.
        description: description of the ``Field``, else the entry under ``Args:`` in a docstring of the term.
    """

    name: str
    type: str
    default: str
    description: str


def first_line(term: Term) -> str:
    """Return the first line of a term's docstring; empty without a docstring.

    >>> from objectives.terms.token.confidence import confidence
    >>> first_line(confidence)[:31]
    'Confidence penalty, ``p log p``'
    """
    return (inspect.getdoc(definition_of(term.evaluate)) or "").partition("\n")[0]


def parameters_of(term: Term) -> list[Parameter]:
    """Describe all parameters of a term, including those of its estimator.

    >>> from objectives.terms.text.logic import logic
    >>> [(parameter.name, parameter.type, parameter.default) for parameter in parameters_of(logic)][-1:]
    [('alpha', 'float > 0', '1.0')]
    """
    functions = (term.evaluate, term.prepare, *estimator_functions(term.estimator))
    documented = _documented_args(*(function for function in functions if function))
    return [
        Parameter(
            name,
            _type(field),
            "" if field.is_required() else repr(field.get_default(call_default_factory=True)),
            field.description or documented.get(name, ""),
        )
        for name, field in term.params.model_fields.items()
    ]


def _type(field: FieldInfo) -> str:
    name = _type_name(field.annotation)
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{sign} {getattr(limit, key)}"
        for limit in field.metadata
        for key, sign in signs.items()
        if hasattr(limit, key)
    ]
    return " ".join([name, " and ".join(limits)]).strip()


def _type_name(annotation: object) -> str:
    """Name of a type, without the metadata of `Annotated`.

    >>> _type_name(Annotated[tuple[int, ...], "metadata"] | None)
    'tuple[int, ...] | None'
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type_name, arguments)))
    if annotation is types.NoneType:
        return "None"
    if isinstance(annotation, type) and not arguments:
        return annotation.__name__
    return re.sub(r"\b(typing|collections\.abc)\.", "", str(annotation))


def _documented_args(*functions: Callable[..., object]) -> dict[str, str]:
    """Parse the entries under ``Args:`` of docstrings, joined to one line each."""
    entries: dict[str, str] = {}
    for function in functions:
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.getdoc(function) or "", re.MULTILINE)
        for entry in re.finditer(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE):
            entries.setdefault(entry[1], " ".join(entry[2].split()))
    return entries

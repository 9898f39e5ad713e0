"""Extractors, which read the steps or the stated values of a solution from its text, and their registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator

from objectives.batch import Batch
from objectives.config.import_path import ImportedFunction
from objectives.errors import ObjectiveError
from objectives.terms.text.annotations import read_solution

Extractor = Callable[[str], object]

# Maximum number of values that `read_assignments` reads from a text; models can repeat a line without end.
MAX_ASSIGNMENTS = 200

# A name, not behind an operator, and a number that no operator continues: `10/x = 5` and `x = 3 + y` are equations. The
# signs of Markdown's lists and bold text are no operators.
_ASSIGNMENT = re.compile(
    r"""
    (?: (?m:^) [ \t]* (?: [-*] | [0-9]+[.)] ) [ \t]+ | (?<=\*\*) | (?<![\w.+*/^-]) (?<![+*/^-][ \t]) )
    ([A-Za-z_]\w*) \s* = \s*
    ( [-\N{MINUS SIGN}]? (?> [0-9]{1,3} (?: ,[0-9]{3} ){1,9} (?![0-9]) | [0-9]{1,30} ) (?: \.[0-9]{1,30} )?+ )
    (?! \w | [,.][0-9] | [ \t]* [-\N{MINUS SIGN}+/^%=] | \( | [ \t]+\* | \* (?! \*(?!\w) ) )
    """,
    re.VERBOSE,
)


def read_assignments(text: str) -> list[tuple[str, Fraction]]:
    """Read the values that a text states as ``name = number``, in order; a name may occur several times.

    Commas may separate groups of three digits; a number with another comma (``12,5``) is not read.

    >>> read_assignments("So x=3 and y = 0.5, since 2*x = 6 and x = 3 + 0.")
    [('x', Fraction(3, 1)), ('y', Fraction(1, 2))]
    """
    matches = zip(_ASSIGNMENT.finditer(text), range(MAX_ASSIGNMENTS), strict=False)
    return [(match[1], Fraction(match[2].replace(",", "").replace("\N{MINUS SIGN}", "-"))) for match, _ in matches]


_EXTRACTORS: dict[str, Extractor] = {"gsm8k": read_solution, "assignments": read_assignments}


def extractor(name: str) -> Callable[[Extractor], Extractor]:
    r"""Register a function of a text; configs select it by name in `logic` and `topology`.

    Both terms accept functions that return a `Solution`. `logic` also accepts values by name, and `topology` a `Graph`
    or a point cloud; see the terms.

    Raises:
        ObjectiveError: another function has registered the name.

    >>> import re
    >>> @extractor("doctest_equations")
    ... def read_equations(text):
    ...     return read_solution(re.sub(r"(?m)^(.+)=(.+)$", r"<<\1=\2>>", text))
    >>> len(read_equations("so\n1+1=2\n2*3=6\n").steps)
    2
    """

    def decorate(function: Extractor) -> Extractor:
        registered = _EXTRACTORS.get(name, function)
        if (registered.__module__, registered.__qualname__) != (function.__module__, function.__qualname__):
            raise ObjectiveError(
                f"The extractor name {name!r} of {function.__module__} is already registered by "
                f"{registered.__module__}; choose another name."
            )
        _EXTRACTORS[name] = function
        return function

    return decorate


def _check_name(name: str | ImportedFunction) -> str | ImportedFunction:
    if isinstance(name, ImportedFunction) or name in _EXTRACTORS:
        return name
    if ":" in name:
        return ImportedFunction(name)
    registered = ", ".join(sorted(_EXTRACTORS))
    raise ValueError(
        f"no extractor is registered as {name!r}, only {registered}; import the module that registers it, or write "
        "its import path, package.module:name"
    )


ExtractorName = Annotated[str | ImportedFunction, AfterValidator(_check_name)]
"""Registered name or import path of an extractor."""


def extract(batch: Batch, name: str | ImportedFunction) -> list[object]:
    """Return what the named extractor reads from the text of each datum.

    Raises:
        ValueError: no extractor has this name.
        ObjectiveError: the batch has no texts, or the extractor's path cannot be imported.
    """
    checked = _check_name(name)
    function = checked if isinstance(checked, ImportedFunction) else _EXTRACTORS[checked]
    return [function(text) for text in get_texts(batch)]


def get_texts(batch: Batch) -> tuple[str, ...]:
    """Return the text of every datum.

    Raises:
        ObjectiveError: the batch has no texts.
    """
    if len(batch.texts_D) != batch.num_datums:
        raise ObjectiveError(
            f"The batch has {batch.num_datums} datums but {len(batch.texts_D)} texts; decode the trained tokens of "
            "every datum into `texts_D`."
        )
    return batch.texts_D

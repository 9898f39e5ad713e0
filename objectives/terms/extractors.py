"""How the steps of a solution are read off its text: by name, so that a config can choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

from objectives.batch import Batch
from objectives.errors import ObjectiveError
from objectives.terms.annotations import Solution, read_solution

Extractor = Callable[[str], Solution]

_EXTRACTORS: dict[str, Extractor] = {"gsm8k": read_solution}


def extractor(name: str) -> Callable[[Extractor], Extractor]:
    r"""Register a function from a text to its `Solution`; `logic` and `topology` take its name as a parameter.

    >>> import re
    >>> @extractor("doctest_equations")
    ... def read_equations(text):
    ...     return read_solution(re.sub(r"(?m)^(.+)=(.+)$", r"<<\1=\2>>", text))
    >>> len(read_equations("so\n1+1=2\n2*3=6\n").steps)
    2
    """

    def decorate(function: Extractor) -> Extractor:
        known = _EXTRACTORS.get(name, function)
        if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ObjectiveError(
                f"Extractor {name!r} of {function.__module__} is already registered by {known.__module__}: give it "
                "another name."
            )
        _EXTRACTORS[name] = function
        return function

    return decorate


def _known(name: str) -> str:
    if name not in _EXTRACTORS:
        raise ValueError(f"known are {', '.join(sorted(_EXTRACTORS))}; import the module that decorates it first")
    return name


ExtractorName = Annotated[str, AfterValidator(_known)]


def read_solutions(batch: Batch, name: str) -> list[Solution]:
    """Read the text of every datum of a batch by the extractor of this name."""
    return [_EXTRACTORS[_known(name)](text) for text in texts_of(batch)]


def texts_of(batch: Batch) -> tuple[str, ...]:
    """The text of every datum.

    Raises:
        ObjectiveError: the batch came without.
    """
    if len(batch.texts_D) != batch.num_datums:
        raise ObjectiveError(
            f"A batch of {batch.num_datums} datums came with {len(batch.texts_D)} texts where a term reads "
            "one for each: decode the trained tokens of every datum into `texts_D`."
        )
    return batch.texts_D

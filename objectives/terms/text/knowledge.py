"""Agreement of the facts stated in a text with a knowledge base."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.term import regularizer
from objectives.terms.text.extractors import get_texts
from objectives.terms.text.lookups import Key, KnowledgeBase, look_up

# Maximum number of facts per text; models can repeat a sentence without end.
MAX_FACTS = 50
# Group of the pattern that matches the stated value; the other groups are the key of the lookup.
STATED = "value"

_EXACT = Context(prec=64)  # more digits than a number has
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?")  # not 007, which may be a code

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _check_pattern(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error
    if STATED not in groups or len(groups) < 2:
        raise ValueError(f"{pattern!r} needs a group (?P<{STATED}>...) for the stated value and a group for the key")
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]


@dataclass(frozen=True, slots=True)
class FactCounts:
    """Numbers of facts of one text that the knowledge base contradicts, confirms and does not know."""

    contradicted: int
    confirmed: int
    unknown: int

    @property
    def known(self) -> int:
        return self.contradicted + self.confirmed


async def check_facts(
    batch: Batch,
    *,
    source: str,
    pattern: Pattern,
    query: str = "",
    per_second: Positive = 10.0,
    timeout_s: Positive = 10.0,
) -> list[FactCounts]:
    """Check the facts stated in each datum's text; each distinct key is looked up once."""
    facts_D = [find_facts(text, pattern) for text in get_texts(batch)]
    keys = [key for facts in facts_D for key, _ in facts]
    values_by_key = await look_up(KnowledgeBase(source, query, per_second, timeout_s), keys)
    return [_count([(values_by_key[key], value) for key, value in facts]) for facts in facts_D]


def find_facts(text: str, pattern: str) -> list[tuple[Key, str]]:
    """Find the facts that a text states, at most `MAX_FACTS`, as pairs of lookup key and stated value.

    >>> find_facts("The capital of Peru is Lima.", r"capital of (?P<country>\\w+) is (?P<value>\\w+)")
    [((('country', 'Peru'),), 'Lima')]
    """
    facts = []
    stating = (match for match in re.finditer(pattern, text) if match[STATED] is not None)
    for match, _ in zip(stating, range(MAX_FACTS), strict=False):
        key = {name: value for name, value in match.groupdict(default="").items() if name != STATED}
        facts.append((tuple(sorted(key.items())), match[STATED]))
    return facts


def _count(facts: list[tuple[tuple[str, ...], str]]) -> FactCounts:
    """Count facts, given as pairs of known values and stated value.

    Case and surrounding spaces are ignored, and numbers compare as numbers: 330.0 confirms 330.
    """
    known = [(values, stated) for values, stated in facts if values]
    confirmed = sum(_normalize(stated) in map(_normalize, values) for values, stated in known)
    return FactCounts(len(known) - confirmed, confirmed, len(facts) - len(known))


def _normalize(value: str) -> str:
    text = value.strip().casefold()
    return str(_EXACT.plus(_EXACT.normalize(Decimal(text)))) if _NUMBER.fullmatch(text) else text


@regularizer("knowledge", kind="scored", prepare=check_facts)
def knowledge(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Share of stated facts that a knowledge base contradicts, ``contradicted / known``, per datum ``(D,)``.

    A fact is a match of ``pattern``: the group ``value`` is the stated value, the other groups are the key of the
    lookup. A fact is contradicted if the knowledge base has values for the key and the stated value is not among them;
    case and trailing zeros of decimals do not matter.
    Facts that the knowledge base does not know are ignored; a text without known facts scores 0.

    Source: fact checking against structured knowledge, as in Thorne & Vlachos 2018, "Automated Fact Checking"
    (arXiv:1806.07687), section 3.

    Args:
        source: path of an SQLite file, or a URL with the names of the pattern's groups in braces
            (`objectives.terms.text.lookups.KnowledgeBase`).
        pattern: a regular expression with named groups.
        query: for SQLite, a SELECT whose first column has the values; its parameters are the pattern's groups.
        per_second: maximum number of requests per second to the host of a URL.
        timeout_s: time limit in seconds of one request, or of the wait for a locked database.

    Metrics, counted over the batch:
        contradicted, confirmed, unknown; checked: contradicted and confirmed.
    """
    counts_D: list[FactCounts] = batch.features
    scores_D = [counts.contradicted / max(1, counts.known) for counts in counts_D]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "contradicted": sum(counts.contradicted for counts in counts_D),
        "confirmed": sum(counts.confirmed for counts in counts_D),
        "unknown": sum(counts.unknown for counts in counts_D),
        "checked": sum(counts.known for counts in counts_D),
    }

"""Knowledge: what a text states as facts has to agree with a knowledge base."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.term import regularizer
from objectives.terms.extractors import texts_of
from objectives.terms.lookups import Key, KnowledgeBase, look_up

# Of one text; texts come from models, which can say the same thing for ever.
MAX_FACTS = 50
# The group of the pattern that has what the text states; the others are what is asked.
STATED = "value"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _checked(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from error
    if STATED not in groups or len(groups) < 2:
        raise ValueError(f"it needs a group (?P<{STATED}>...) for what is stated and another for what it is stated of")
    return pattern


Pattern = Annotated[str, AfterValidator(_checked)]


@dataclass(frozen=True, slots=True)
class Checked:
    """How many facts of one text the knowledge base contradicts, confirms, and does not know."""

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
) -> list[Checked]:
    """Look up what each datum's text states; the same fact is looked up once."""
    stated_D = [find_facts(text, pattern) for text in texts_of(batch)]
    keys = [key for stated in stated_D for key, _ in stated]
    known = await look_up(KnowledgeBase(source, query, per_second, timeout_s), keys)
    return [_check([(known[key], value) for key, value in stated]) for stated in stated_D]


def find_facts(text: str, pattern: str) -> list[tuple[Key, str]]:
    """The facts that a text states, at most `MAX_FACTS`: what is asked, and what is stated of it.

    >>> find_facts("The capital of Peru is Lima.", r"capital of (?P<country>\\w+) is (?P<value>\\w+)")
    [((('country', 'Peru'),), 'Lima')]
    """
    facts = []
    for found, _ in zip(re.finditer(pattern, text), range(MAX_FACTS), strict=False):
        groups = {name: value for name, value in found.groupdict(default="").items() if name != STATED}
        facts.append((tuple(sorted(groups.items())), found[STATED] or ""))
    return facts


def _check(facts: list[tuple[tuple[str, ...], str]]) -> Checked:
    """Against each list of right values; case and spaces around do not matter."""
    known = [(values, stated) for values, stated in facts if values]
    right = sum(_plain(stated) in map(_plain, values) for values, stated in known)
    return Checked(len(known) - right, right, len(facts) - len(known))


def _plain(value: str) -> str:
    return value.strip().casefold()


@regularizer("knowledge", kind="scored", prepare=check_facts)
def knowledge(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Share of the stated facts that a knowledge base contradicts, ``contradicted / known``, per datum ``(D,)``.

    A fact is a match of ``pattern``: its group ``value`` is what the text states, its other groups are what the
    knowledge base is asked. It is contradicted where the answer has values and the stated one is none of them; what the
    knowledge base does not know counts neither way, and a text without known facts has 0.

    Source: fact checking against structured knowledge, as in Thorne & Vlachos 2018, "Automated Fact Checking"
    (arXiv:1806.07687), section 3.

    Args:
        source, query, per_second, timeout_s: the knowledge base, see `objectives.terms.lookups.KnowledgeBase`.
        pattern: a regular expression with named groups.

    Metrics, counted over the batch:
        contradicted, confirmed, unknown.
    """
    checked: list[Checked] = batch.features
    scores_D = [each.contradicted / max(1, each.known) for each in checked]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "contradicted": sum(each.contradicted for each in checked),
        "confirmed": sum(each.confirmed for each in checked),
        "unknown": sum(each.unknown for each in checked),
    }

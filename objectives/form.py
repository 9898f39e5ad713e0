"""The JSON schema of a spec as a form wants it: names to choose from, and limits that say what is wrong."""

from __future__ import annotations

from typing import Any

from objectives.find_term import offered_terms, registered_terms
from objectives.losses import BASE_LOSSES

IMPORT_PATH = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"

# They hold for one type each, so that they may as well stand beside a union as in it.
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern"}


def limits_beside_unions(schema: dict[str, Any]) -> None:
    """Move the limits of each field that is a union out of its members.

    In it, a validator can only say that a value is not valid under any of them; beside it, that it is too small.

    >>> schema = {"properties": {"steps": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}}}
    >>> limits_beside_unions(schema)
    >>> schema["properties"]["steps"]
    {'anyOf': [{'type': 'integer'}, {'type': 'null'}], 'minimum': 1}
    """
    for field in schema.get("properties", {}).values():
        for union in ("anyOf", "oneOf"):
            members = field.get(union, ())
            limited = [member for member in members if _LIMITS & member.keys()]
            if len(limited) == 1:
                limits = {key: value for key, value in limited[0].items() if key in _LIMITS}
                field[union] = [
                    {key: value for key, value in member.items() if key not in limits}
                    if member is limited[0]
                    else member
                    for member in members
                ]
                field.update(limits)


def choose_term(schema: dict[str, Any]) -> None:
    """Make a regularizer's name a choice of the terms that are registered here, or that installed packages offer.

    A name that is none of them has to say in ``fn`` which term it stands for, by one of these or by an import path.
    """
    limits_beside_unions(schema)
    choice = {"title": "Registered term", "type": "string", "enum": _named()}
    name, fn = schema["properties"]["name"], schema["properties"]["fn"]
    name["anyOf"] = [choice, {"title": "Own name", "type": name.pop("type")}]
    path = {"title": "Import path", "type": "string", "pattern": IMPORT_PATH}
    fn["anyOf"] = [choice, path, {"type": "null"}]
    given = {"properties": {"fn": {"type": "string"}}, "required": ["fn"]}
    schema["if"] = {"not": given}
    schema["then"] = {"properties": {"name": {"enum": choice["enum"]}}}


def choose_base_loss(schema: dict[str, Any]) -> None:
    """Make an objective's base loss a choice of those that are known here."""
    limits_beside_unions(schema)
    text, *others = schema["properties"]["base_loss"]["anyOf"]
    losses = {"title": "Loss", "type": "string", "enum": sorted(BASE_LOSSES)}
    schema["properties"]["base_loss"]["anyOf"] = [losses, {**text, "title": "Term"}, *others]


def _named() -> list[str]:
    return sorted(registered_terms().keys() | offered_terms().keys())

"""JSON schema of specs for forms: choices of registered names, and limits with clear validation messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaValue

from objectives.config.term_lookup import offered_terms, registered_terms
from objectives.losses import BASE_LOSSES

OFF = "off"
"""Value of a field that turns a feature off, as None does."""

IMPORT_PATH = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"

# Each limit applies to one JSON type, so it can be moved from a union's member to the union.
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern"}


def move_limits_out_of_unions(schema: JsonSchemaValue) -> None:
    """Move limits from the members of union fields to the field.

    A limit inside a union gives the message "not valid under any of the given schemas"; on the field, it gives the
    specific reason, such as "less than the minimum".

    >>> schema = {"properties": {"steps": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}}}
    >>> move_limits_out_of_unions(schema)
    >>> schema["properties"]["steps"]
    {'anyOf': [{'type': 'integer'}, {'type': 'null'}], 'minimum': 1}
    """
    for field in schema.get("properties", {}).values():
        if "anyOf" in field:  # an optional union is a union in a union
            field["anyOf"] = [inner for member in field["anyOf"] for inner in member.get("oneOf", [member])]
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


def leave_none_unset(schema: JsonSchemaValue) -> None:
    """Turn optional numbers and texts into fields that may be left empty.

    Prefect's form shows a union with null as a choice of types, and its default as ``Property is type "None"``. Without
    the null, the form has an empty input. Prefect's server accepts null for optional fields without a default anyway.

    >>> schema = {"properties": {"steps": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}}
    >>> leave_none_unset(schema)
    >>> schema["properties"]["steps"]
    {'type': 'integer'}
    """
    for field in schema.get("properties", {}).values():
        members = field.get("anyOf", ())
        is_optional = len(members) == 2 and members[1] == {"type": "null"} and field.get("default", 0) is None
        if is_optional and members[0].get("type") in ("integer", "number", "string") and "enum" not in members[0]:
            del field["anyOf"], field["default"]
            field.update({**members[0], **field})


def optional_group(model: type[BaseModel]) -> Callable[[JsonSchemaValue], None]:
    """Return a function that adapts the schema of an optional group of fields to Prefect's form.

    The form submits every default, so a field with a default would set a group that nobody filled in. The defaults are
    therefore moved into the descriptions. The group's fields are written inline instead of as a reference, for which
    Prefect's server rejects null.
    """

    def inline(field: JsonSchemaValue) -> None:
        group = model.model_json_schema()
        for inner in group["properties"].values():
            default = inner.pop("default", None)
            if default is not None:
                inner["description"] = f"{inner['description']} Default: {json.dumps(default)}."
        del field["anyOf"]
        field.pop("default", None)
        # Without `required`, because the form sends an empty mapping for some groups that nobody has filled in.
        field.update({key: group[key] for key in ("type", "properties", "additionalProperties")})

    return inline


def form_fields(schema: JsonSchemaValue) -> None:
    """Adapt the fields of a schema to forms: limits outside of unions, and no null in optional numbers and texts."""
    move_limits_out_of_unions(schema)
    leave_none_unset(schema)


def put_first(schema: JsonSchemaValue, names: Sequence[str]) -> None:
    """Order the fields of a form: those named first, then single values, then groups of fields.

    >>> fields = {"guards": {"$ref": "#"}, "seed": {}, "model": {}, "budget": {"allOf": [{"$ref": "#"}]}}
    >>> schema = {"properties": fields}
    >>> put_first(schema, ["model", "data"])
    >>> list(schema["properties"])
    ['model', 'seed', 'guards', 'budget']
    """
    fields: dict[str, JsonSchemaValue] = schema.get("properties", {})

    def rank(name: str) -> int:
        is_group = bool({"$ref", "allOf", "properties"} & fields[name].keys())
        return names.index(name) if name in names else len(names) + is_group

    schema["properties"] = {name: fields[name] for name in sorted(fields, key=rank)}


def choose_term(schema: JsonSchemaValue) -> None:
    """Make a regularizer's name a choice of registered terms and of terms from installed packages.

    Any other name requires ``fn``, with one of these terms or an import path.
    """
    form_fields(schema)
    choice = {"title": "Registered term", "type": "string", "enum": _term_names()}
    name, fn = schema["properties"]["name"], schema["properties"]["fn"]
    name["anyOf"] = [choice, {"title": "Own name", "type": name.pop("type")}]
    names = "|".join(map(re.escape, choice["enum"]))
    fn["pattern"] = f"^({names})$|{IMPORT_PATH}"
    has_fn = {"properties": {"fn": {"type": "string"}}, "required": ["fn"]}
    schema["if"] = {"not": has_fn}
    schema["then"] = {"properties": {"name": {"enum": choice["enum"]}}}


def choose_base_loss(schema: JsonSchemaValue) -> None:
    """Make the base loss a choice of the known losses, and add `off` as the default choice of `balance`."""
    form_fields(schema)
    text, *others = schema["properties"]["base_loss"]["anyOf"]
    losses = {"title": "Loss", "type": "string", "enum": sorted(BASE_LOSSES)}
    schema["properties"]["base_loss"]["anyOf"] = [losses, {**text, "title": "Term"}, *others]
    balance = schema["properties"]["balance"]
    # Without a default choice, the form would select the first balancing rule and submit its defaults.
    off = {"title": "Off", "type": "string", "enum": [OFF]}
    balance |= {"anyOf": [off, *balance["anyOf"]], "default": OFF}


def _term_names() -> list[str]:
    return sorted(registered_terms().keys() | offered_terms().keys())

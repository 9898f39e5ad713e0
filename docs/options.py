"""Write the option tables of the docs from the config models.

python -m docs.options

rewrites every block of the pages in this folder between two markers. The first names a class of `tinker_flows`, and
optionally a base class whose fields another table already has:

    <!-- options: RlConfig except TrainConfig -->
    <!-- end options -->
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import tinker_flows

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- options: (\w+)(?: except (\w+))? -->\n)(.*?)(<!-- end options -->)", re.DOTALL)
HEADER = "| field | type | default | meaning |\n|---|---|---|---|\n"


def render_table(config: type[BaseModel], base: type[BaseModel] | None = None) -> str:
    """Markdown table of a config's fields, without fields whose description and default are those in `base`.

    >>> from tinker_flows import KeepBestConfig
    >>> print(render_table(KeepBestConfig).splitlines()[-1].rpartition(" | ")[0])
    | `mode` | `"min"` or `"max"` | `"min"`
    """
    inherited = base.model_fields if base is not None else {}
    schemas = config.model_json_schema()["properties"]
    rows = [
        f"| `{name}` | {_type_cell(field.annotation, schemas[name])} | {_default_cell(field)} "
        f"| {_escape(field.description or '')} |\n"
        for name, field in config.model_fields.items()
        if name not in inherited or not _same(field, inherited[name])
    ]
    return HEADER + "".join(rows)


def update_page(text: str) -> str:
    """The page with every option table generated anew."""

    def generate(block: re.Match[str]) -> str:
        config = getattr(tinker_flows, block[2])
        base = getattr(tinker_flows, block[3]) if block[3] else None
        return f"{block[1]}\n{render_table(config, base)}\n{block[5]}"

    return BLOCK.sub(generate, text)


def find_pages() -> list[Path]:
    """Every page with an option table."""
    return [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())]


def _same(field: FieldInfo, inherited: FieldInfo) -> bool:
    return (field.description, field.get_default(call_default_factory=True, validated_data={})) == (
        inherited.description,
        inherited.get_default(call_default_factory=True, validated_data={}),
    )


def _type_cell(annotation: Any, schema: dict[str, Any]) -> str:
    names = [*_type_names(annotation)]
    if annotation is float:  # the schema also has words that a validator replaces by a number, such as `auto`
        names += [f"`{json.dumps(word)}`" for option in schema.get("anyOf", ()) for word in option.get("enum", ())]
    return " or ".join(dict.fromkeys(names))


def _type_names(annotation: Any) -> Iterator[str]:
    """Names of the types that an annotation allows, without None: the default column shows what is optional."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from (f"`{json.dumps(value)}`" for value in arguments)
    elif origin is Annotated:
        yield from _type_names(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _type_names(argument)
    elif origin in (tuple, list):
        yield f"list of {_type_cell(arguments[0], {})}"
    elif origin is dict:
        yield "mapping"
    elif annotation is Any:
        yield "any"
    elif annotation is not type(None):
        yield getattr(annotation, "__name__", str(annotation))


def _default_cell(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "unset"
    if isinstance(default, BaseModel):
        changed = default.model_dump(mode="json", exclude_defaults=True)
        return f"`{_escape(json.dumps(changed))}`" if changed else ""
    return f"`{_escape(json.dumps(default))}`"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for path in find_pages():
        path.write_text(update_page(path.read_text()))

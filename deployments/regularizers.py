"""The terms that an objective can name, as a table for the terminal or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from objectives.describe import Parameter, first_line, parameters_of
from objectives.errors import ObjectiveError
from objectives.find_term import load_offered, offered_terms, registered_terms
from objectives.term import Term


def show_regularizers(as_json: bool) -> None:
    """Print every registered term and every one that an installed package offers."""
    if as_json:
        print(json.dumps([_fields(name, term) for name, term in sorted(_every_term().items())], indent=2))
        return
    table = Table(title="Regularizers", title_justify="left", show_lines=True)
    for column in ("name", "kind", "parameters", "what it is"):
        table.add_column(column, overflow="fold")
    for name, term in sorted(_every_term().items()):
        table.add_row(escape(name), *(escape(cell) for cell in _cells(term)))
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)


def _every_term() -> dict[str, Term | str]:
    """By name; for one that cannot be loaded, why not."""
    terms: dict[str, Term | str] = {**registered_terms()}
    for name, offer in offered_terms().items():
        try:
            terms[name] = load_offered(offer)
        except ObjectiveError as error:
            terms[name] = str(error)
    return terms


def _fields(name: str, term: Term | str) -> dict[str, Any]:
    if isinstance(term, str):
        return {"name": name, "error": term}
    parameters = [asdict(each) for each in parameters_of(term)]
    about = {"kind": term.kind, "estimator": term.estimator, "description": first_line(term)}
    return {"name": name, **about, "parameters": parameters}


def _cells(term: Term | str) -> tuple[str, str, str]:
    if isinstance(term, str):
        return "", "", term
    kind = f"{term.kind}\n{term.estimator}" if term.estimator else term.kind
    return kind, "\n".join(_written(each) for each in parameters_of(term)), first_line(term)


def _written(parameter: Parameter) -> str:
    default = f" = {parameter.default}" if parameter.default else " (has to be given)"
    return f"{parameter.name}: {parameter.type}{default}" + (
        f"  {parameter.description}" if parameter.description else ""
    )

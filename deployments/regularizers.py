"""Regularizers available to an objective, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.table import Table

from blocks.terminal import TextConsole
from objectives.config.describe import Parameter, first_line, parameters_of
from objectives.config.term_lookup import load_offered, offered_terms, registered_terms
from objectives.errors import ObjectiveError
from objectives.term import Term


def show_regularizers(as_json: bool) -> None:
    """Print every registered regularizer, including those of installed packages."""
    if as_json:
        print(json.dumps([_fields(name, term) for name, term in sorted(_all_terms().items())], indent=2))
        return
    table = Table(title="Regularizers", title_justify="left", show_lines=True)
    for column in ("name", "kind", "parameters", "description"):
        table.add_column(column, overflow="fold")
    for name, term in sorted(_all_terms().items()):
        table.add_row(name, *_cells(term))
    TextConsole(width=None if sys.stdout.isatty() else 120, soft_wrap=False).print(table)


def _all_terms() -> dict[str, Term | str]:
    """Return every term by name; a term that cannot be loaded is represented by its error message."""
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
    parameters = [asdict(parameter) for parameter in parameters_of(term)]
    properties = {"kind": term.kind, "estimator": term.estimator, "description": first_line(term)}
    return {"name": name, **properties, "parameters": parameters}


def _cells(term: Term | str) -> tuple[str, str, str]:
    if isinstance(term, str):
        return "", "", term
    kind = f"{term.kind}\n{term.estimator}" if term.estimator else term.kind
    return kind, "\n".join(_format(parameter) for parameter in parameters_of(term)), first_line(term)


def _format(parameter: Parameter) -> str:
    default = f" = {parameter.default}" if parameter.default else " (required)"
    return f"{parameter.name}: {parameter.type}{default}" + (
        f"  {parameter.description}" if parameter.description else ""
    )

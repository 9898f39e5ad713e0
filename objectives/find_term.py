"""From what a spec says to a term: a registered name, an entry point of an installed package, an import path."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points

from objectives.errors import ObjectiveError
from objectives.term import TERMS, Term

ENTRY_POINTS = "tinker_flows.regularizers"
ALLOWED_MODULES = "TINKER_FLOWS_REGULARIZER_MODULES"


def registered_terms() -> dict[str, Term]:
    """Every term registered so far, by name; the built-in ones are there without being imported."""
    import objectives.terms  # noqa: F401  # only now, for what they import

    return dict(TERMS)


def find_term(name: str, modules: Collection[str] | None = None) -> Term:
    """The term of a name.

    Args:
        name: what a term is registered as; else an entry point of the group ``tinker_flows.regularizers``, whose
            module is imported only now; or an import path, ``package.module:name``.
        modules: what an import path may lead to: these modules and those in them; ``None`` is everywhere.

    Raises:
        ObjectiveError: there is none, its module may not be imported or cannot be, or it is no term.
    """
    if ":" in name:
        return _imported(name, modules)
    known = registered_terms()
    if name in known:
        return known[name]
    offered = offered_terms()
    if name in offered:
        return load_offered(offered[name])
    names = ", ".join(sorted(known.keys() | offered.keys()))
    raise ObjectiveError(
        f"No term is registered as {name!r}, only {names}: correct the name, "
        "import the module that decorates it with `@regularizer`, or give its import path, package.module:name."
    )


def allowed_modules() -> tuple[str, ...]:
    """The modules that plain data (a file, a form, a request) may import terms from, by the operator's word."""
    return tuple(module.strip() for module in os.environ.get(ALLOWED_MODULES, "").split(",") if module.strip())


def offered_terms() -> dict[str, EntryPoint]:
    """The terms that installed packages offer and that nothing has loaded yet, by name."""
    known = registered_terms()
    return {each.name: each for each in entry_points(group=ENTRY_POINTS) if each.name not in known}


def load_offered(offer: EntryPoint) -> Term:
    """Import what an installed package offers.

    Raises:
        ObjectiveError: it cannot be imported or is no term.
    """
    origin = f"{offer.value} of {offer.dist.name if offer.dist else 'an installed package'}"
    try:
        return _checked(offer.load(), origin)
    except ObjectiveError:
        raise
    except Exception as error:  # another package's module, whatever it does when it is imported
        raise _unimportable(offer.name, origin, error) from error


def _imported(path: str, modules: Collection[str] | None) -> Term:
    module, _, attribute = path.partition(":")
    if modules is not None and not any(module == each or module.startswith(f"{each}.") for each in modules):
        raise ObjectiveError(
            f"The term {path!r} is in the module {module!r}, and plain data may import terms from "
            f"{', '.join(modules) or 'no module'} only: add it to {ALLOWED_MODULES} where the run is started, or "
            "register the term there and give its name."
        )
    try:
        return _checked(getattr(importlib.import_module(module), attribute), path)
    except ObjectiveError:
        raise
    except Exception as error:  # somebody else's module, whatever it does when it is imported
        raise _unimportable(path, path, error) from error


def _checked(found: object, origin: str) -> Term:
    if not isinstance(found, Term):
        raise ObjectiveError(
            f"{origin} is of type {type(found).__name__}, where a term is expected: decorate the function with "
            "`@regularizer`."
        )
    return found


def _unimportable(name: str, origin: str, error: Exception) -> ObjectiveError:
    said = " ".join(str(error).split()).rstrip(".")
    return ObjectiveError(
        f"The term {name!r} could not be imported from {origin} ({type(error).__name__}: {said}): correct the path, or "
        "install or mend what it needs."
    )

"""Lookup of terms by registered name, entry point of an installed package, or import path."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from objectives.config.import_path import import_path
from objectives.config.import_policy import check_module
from objectives.errors import ObjectiveError, did_you_mean
from objectives.term import TERMS, Term

ENTRY_POINTS = "tinker_flows.regularizers"


def registered_terms() -> dict[str, Term]:
    """Return all registered terms by name, including the built-in ones."""
    import objectives.terms  # noqa: F401  # registers the built-in terms; imported late because of their dependencies

    return dict(TERMS)


def find_term(name: str) -> Term:
    """Find a term.

    Args:
        name: a registered name; else the name of an entry point of the group ``tinker_flows.regularizers``, which is
            imported on first use; or an import path, ``package.module:name``.

    Raises:
        NotAllowedError: the config of a deployment may not import from the term's module.
        ObjectiveError: no term has the name, its module cannot be imported, or it is not a term.
    """
    if ":" in name:
        return _imported(name)
    known = registered_terms()
    if name in known:
        return known[name]
    offered = offered_terms()
    if name in offered:
        return load_offered(offered[name])
    terms = sorted(known.keys() | offered.keys())
    guess = did_you_mean(name, terms) or "."
    raise ObjectiveError(
        f"No term is registered as {name!r}{guess} The terms are {', '.join(terms)}; correct the name, import the "
        "module that registers the term with `@regularizer`, or use its import path, package.module:name."
    )


def offered_terms() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages whose terms are not registered yet, by name."""
    known = registered_terms()
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in known}


def load_offered(offer: EntryPoint) -> Term:
    """Import the term of an entry point.

    Raises:
        NotAllowedError: the config of a deployment may not import from the term's module.
        ObjectiveError: the object cannot be imported or is not a term.
    """
    check_module(offer.module, offer.value)
    origin = f"{offer.value} of {offer.dist.name if offer.dist else 'an installed package'}"
    try:
        return _checked(offer.load(), origin)
    except ObjectiveError:
        raise
    except Exception as error:  # Importing another package's module can raise anything.
        raise _unimportable(offer.name, origin, error) from error


def _imported(path: str) -> Term:
    try:
        return _checked(import_path(path), path)
    except ObjectiveError:
        raise
    except Exception as error:  # Importing a user's module can raise anything.
        raise _unimportable(path, path, error) from error


def _checked(candidate: object, origin: str) -> Term:
    if not isinstance(candidate, Term):
        raise ObjectiveError(
            f"{origin} is of type {type(candidate).__name__}, not a term; decorate the function with `@regularizer`."
        )
    return candidate


def _unimportable(name: str, origin: str, error: Exception) -> ObjectiveError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ObjectiveError(
        f"The term {name!r} could not be imported from {origin} ({type(error).__name__}: {reason}); correct the path, "
        "or install or fix its dependencies."
    )
